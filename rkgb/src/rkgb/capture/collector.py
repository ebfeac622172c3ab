"""Python's search for reference cycles, put off while it would cost much or do harm."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_active = [0, False]  # how many captures run, and whether the search was on before the first


@contextmanager
def no_collection() -> Iterator[None]:
    """While active, Python looks for no cycles.

    A capture makes a hundred objects an operation and drops few, and none of its own in a cycle.
    Each search walks over all that there are, so that they take a third of a long capture. While
    memory is metered, what a search frees would look like memory that the step gave back. What is
    made in the meantime stays young, so that `Device.give_back` finds the cycles among it.
    """
    with _lock:
        if not _active[0]:
            _active[1] = gc.isenabled()
        _active[0] += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _active[0] -= 1
            if _active[1] and not _active[0]:
                gc.enable()
