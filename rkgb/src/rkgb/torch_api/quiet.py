"""Captures prints and warnings of one thread; other threads are not affected.

All threads share `sys.stdout` and the filters of warnings.
A thread's profile function may be one that is written in C, which is put back as it was.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any


def is_elsewhere(here: int) -> bool:
    """Return whether this is another thread than `here`, and not one of autograd's."""
    now = threading.get_ident()
    if now == here:
        return False
    # Python does not list autograd's threads, in which our backwards may run.
    dummy = threading._DummyThread
    return any(t.ident == now and not isinstance(t, dummy) for t in threading.enumerate())


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
        """Behave as the original for every thread, and keep nothing else: code may keep this."""
        self._thread = self._ours = None


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


_log = logging.getLogger("rkgb")


def set_profile(looking: Any) -> None:
    """Let this thread's calls be looked at by what `sys.getprofile` returned before.

    Before Python 3.12 that may be a `cProfile.Profile`, which `sys.setprofile` would call. That of
    `torch.profiler.profile(with_stack=True)` cannot be set from Python: it sees no more calls.
    """
    enable = None if callable(looking) else getattr(looking, "enable", None)
    if enable is not None:
        enable()
    elif looking is None or callable(looking):
        sys.setprofile(looking)
    else:
        _log.warning(
            "torch.profiler sees no more Python calls of this profile, as a module is recorded "
            "within it. Run the first step before the profile begins."
        )
