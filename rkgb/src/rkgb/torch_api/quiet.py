"""What one thread prints and warns of, taken for a while; other threads go on as they were.

`sys.stdout` and the filters of warnings are everybody's.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any


class _Stream:
    """Stands for `sys.stdout` or `sys.stderr`; to other threads it is what stood there."""

    def __init__(self, ours: Any, before: Any) -> None:
        self._ours, self._before = ours, before
        self._thread: int | None = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours if threading.get_ident() == self._thread else self._before, name)

    def __iter__(self) -> Any:
        return iter(self._before)

    def end(self) -> None:
        """Be what stood there to every thread: somebody may have kept this."""
        self._thread = None


@contextlib.contextmanager
def printing_to(stream: Any, name: str = "stdout") -> Iterator[None]:
    """While active, what this thread prints goes to `stream`."""
    stand_in = _Stream(stream, getattr(sys, name))
    setattr(sys, name, stand_in)
    try:
        yield
    finally:
        stand_in.end()
        if getattr(sys, name) is stand_in:
            setattr(sys, name, stand_in._before)


class _Here:
    """Stands for the pattern of a filter: every message of this thread fits."""

    def __init__(self) -> None:
        self.thread: int | None = threading.get_ident()

    def match(self, _text: str) -> bool:
        return threading.get_ident() == self.thread


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """While active, nobody hears of what this thread is warned of."""
    here, filters = _Here(), warnings.filters
    entry: Any = ("ignore", here, Warning, None, 0)
    filters.insert(0, entry)  # type: ignore[attr-defined]
    _are_other_filters()
    try:
        yield
    finally:
        here.thread = None
        for known in (filters, warnings.filters):  # which may be a copy that somebody put there
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
