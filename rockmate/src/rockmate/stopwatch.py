"""Seconds by named part, summed over calls, for whoever asked for them.

The parts of planning (options, chain, simulation) are entered from many places; handing a timer
through all of them would put it into every signature.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar

_current: ContextVar[dict[str, float] | None] = ContextVar("rockmate_stopwatch", default=None)


@contextlib.contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Collect the seconds of every `timed` part that runs inside."""
    seconds: dict[str, float] = {}
    token = _current.set(seconds)
    try:
        yield seconds
    finally:
        _current.reset(token)


@contextlib.contextmanager
def timed(part: str) -> Iterator[None]:
    """Add the time that is spent inside to `part`, if anybody collects."""
    seconds = _current.get()
    if seconds is None:
        yield
        return
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - began
