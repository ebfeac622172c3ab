"""Ctrl-C during a solver that installs its own signal handler.

CLP replaces Python's handler while it solves. Ctrl-C would then end only that solve, and Python
would not notice. So Python's handler is restored while CLP runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Iterator

_LOOK_S = 0.01


@contextlib.contextmanager
def heard_interrupts() -> Iterator[None]:
    """While active, Ctrl-C reaches Python: KeyboardInterrupt is raised when the solver returns."""
    try:
        get, put = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    except AttributeError:  # another Python
        yield
        return
    get.restype = put.restype = ctypes.c_void_p
    put.argtypes = [ctypes.c_int, ctypes.c_void_p]
    ours, over = get(signal.SIGINT), threading.Event()

    def keep() -> None:
        while not over.wait(_LOOK_S):
            if get(signal.SIGINT) != ours:
                put(signal.SIGINT, ours)

    keeper = threading.Thread(target=keep, name="rockmate-interrupts", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()
        put(signal.SIGINT, ours)
