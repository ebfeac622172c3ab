"""Switches Python's garbage collection off while it would be slow or harmful."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_active = [0, False]  # number of captures, and whether collection was on before the first


@contextmanager
def no_collection() -> Iterator[None]:
    """While active, Python's garbage collection is off.

    A capture makes a hundred objects per operation, drops few, and has none in cycles. Each
    collection visits all objects, so collections would take a third of a long capture. While memory
    is metered, memory freed by a collection would count as released by the step. Objects made
    meanwhile stay young, so `Device.give_back` still finds cycles among them.
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
