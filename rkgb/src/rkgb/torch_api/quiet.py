"""Captures prints and warnings of one thread; other threads are not affected.

All threads share `sys.stdout` and the filters of warnings.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any


class _Stream:
    """Replaces `sys.stdout` or `sys.stderr`; for other threads it behaves as the original."""

    def __init__(self, ours: Any, before: Any) -> None:
        self._ours, self._before = ours, before
        self._thread: int | None = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours if threading.get_ident() == self._thread else self._before, name)

    def __iter__(self) -> Any:
        return iter(self._before)

    def end(self) -> None:
        """Behave as the original for every thread: other code may have kept this object."""
        self._thread = None


@contextlib.contextmanager
def printing_to(stream: Any, name: str = "stdout") -> Iterator[None]:
    """While active, prints of this thread go to `stream`."""
    stand_in = _Stream(stream, getattr(sys, name))
    setattr(sys, name, stand_in)
    try:
        yield
    finally:
        stand_in.end()
        if getattr(sys, name) is stand_in:
            setattr(sys, name, stand_in._before)


def without_prints(name: str = "stdout") -> contextlib.AbstractContextManager[None]:
    """While active, prints of this thread are dropped."""
    return printing_to(io.StringIO(), name)


class _Here:
    """Replaces the pattern of a filter; it matches every message of this thread."""

    def __init__(self) -> None:
        self.thread: int | None = threading.get_ident()

    def match(self, _text: str) -> bool:
        return threading.get_ident() == self.thread


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """While active, warnings of this thread are ignored."""
    here, filters = _Here(), warnings.filters
    entry: Any = ("ignore", here, Warning, None, 0)
    filters.insert(0, entry)  # type: ignore[attr-defined]
    _are_other_filters()
    try:
        yield
    finally:
        here.thread = None
        for known in (filters, warnings.filters):  # other code may have installed a copy
            with contextlib.suppress(ValueError):
                known.remove(entry)  # type: ignore[attr-defined]
        _are_other_filters()


def _are_other_filters() -> None:
    for name in ("_filters_mutated", "_filters_mutated_lock_held"):
        mutated = getattr(warnings, name, None)
        if mutated is not None:
            lock = getattr(warnings, "_lock", None)
            with lock if lock is not None else contextlib.nullcontext():
                mutated()
            return
