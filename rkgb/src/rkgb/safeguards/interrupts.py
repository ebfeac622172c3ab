"""Signals that wait while something is put back.

Planning replaces functions of Python and torch for a while, and changes what the user's forward
leads to. A Ctrl-C in the middle of putting this back would leave it so for good. So would what any
other handler of a signal raises, such as a timeout's.
"""

from __future__ import annotations

import _thread
import ast
import contextlib
import functools
import linecache
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from rkgb.guards.owners import is_ours, is_users

# Signals whose handlers stop what runs, or save it; those of profilers are heard at once.
_NAMES = ("SIGINT", "SIGBREAK", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
_SIGNALS = [signal.Signals[name] for name in _NAMES if name in signal.Signals.__members__]
_WAIT_S = 0.01
_MOST_WAITS = 500  # nothing takes so long to be put back
_AROUND = frozenset(("__enter__", "__exit__", "enter_context"))
_state = threading.local()  # `.waits`: signals wait; only in the main thread


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """While active, handlers that may stop the work run only when nothing is being put back.

    It is for the main thread, as Python runs handlers there. Handlers that others install meanwhile
    stay.
    """
    if threading.current_thread() is not threading.main_thread() or getattr(_state, "waits", False):
        yield
        return
    handlers = {s: handler for s in _SIGNALS if callable(handler := signal.getsignal(s))}
    ours: dict[signal.Signals, Any] = {s: _later(handler) for s, handler in handlers.items()}
    _state.waits = True
    try:
        for number, later in ours.items():
            signal.signal(number, later)
        yield
    finally:
        for number, later in ours.items():
            if signal.getsignal(number) is later:
                signal.signal(number, handlers[number])
        _state.waits = False


def _later(handler: Any) -> Any:
    waited = 0

    def handle(number: int, frame: FrameType | None) -> Any:
        nonlocal waited
        if waited < _MOST_WAITS and _puts_back(frame):
            waited += 1
            _thread.start_new_thread(_again, (number,))  # it takes no lock that may be held here
            return None
        waited = 0
        return handler(number, frame)

    return handle


def _again(number: int) -> None:
    time.sleep(_WAIT_S)
    _thread.interrupt_main(signal.Signals(number))


def _puts_back(frame: FrameType | None) -> bool:
    """Whether a context is entered or left, not by the user's code, or ours is at a `finally`."""
    while frame is not None:
        code, name = frame.f_code, frame.f_globals.get("__name__")
        if code.co_name in _AROUND and not is_users(name):
            return True
        if is_ours(name) and frame.f_lineno in _last(code.co_filename):
            return True
        frame = frame.f_back
    return False


@functools.cache
def _last(file: str) -> frozenset[int]:
    """Return the lines of a file that run at last, whatever was raised."""
    tree = ast.parse("".join(linecache.getlines(file)))
    tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try)]
    last = [statement for each in tries for statement in each.finalbody]
    for handler in (handler for each in tries for handler in each.handlers):
        if isinstance(handler.type, ast.Name) and handler.type.id == "BaseException":
            last += handler.body
    return frozenset(n for s in last for n in range(s.lineno, (s.end_lineno or s.lineno) + 1))
