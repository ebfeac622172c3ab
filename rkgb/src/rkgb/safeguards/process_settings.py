"""Settings of the process that a forward may set: put back after planning, which runs it, too.

A part that runs again in a step reads them, too, so reading is quick: all of it takes 15 µs.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` looks names of handlers up
import gc
import locale
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any


def process_settings() -> Callable[[], None]:
    """Return what puts back how the process is set now, where that has changed meanwhile.

    Examples:
        >>> put_back, limit = process_settings(), sys.getrecursionlimit()
        >>> sys.setrecursionlimit(limit + 1)
        >>> put_back()
        >>> sys.getrecursionlimit() == limit
        True
    """
    known = [(read, put, read()) for read, put in _SETTINGS]

    def put_back() -> None:
        for read, put, before in known:
            if read() != before:
                put(before)

    return put_back


def _folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 (a Path takes longer than all the rest)
    except FileNotFoundError:  # somebody has removed it
        return None


def _put_folder(path: str | None) -> None:
    if path is not None:
        os.chdir(path)


def _handlers() -> dict[int, Any]:
    """Return the handlers of signals, which only the main thread can set."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: _signal.getsignal(number) for number in _SIGNALS}


def _put_handlers(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        if _signal.getsignal(number) is not handler and handler is not None:
            signal.signal(number, handler)


def _timeout() -> float | None:
    socket: Any = sys.modules.get("socket")
    return None if socket is None else socket.getdefaulttimeout()


def _put_timeout(seconds: float | None) -> None:
    sys.modules["socket"].setdefaulttimeout(seconds)


_SIGNALS = tuple(map(int, signal.valid_signals()))
# What reads one, and what sets it.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (_folder, _put_folder),
    (_handlers, _put_handlers),
    (_timeout, _put_timeout),
    (lambda: locale.setlocale(locale.LC_ALL), lambda name: locale.setlocale(locale.LC_ALL, name)),
    (gc.get_threshold, lambda counts: gc.set_threshold(*counts)),
    (threading.stack_size, threading.stack_size),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (sys.getswitchinterval, sys.setswitchinterval),
    (sys.get_int_max_str_digits, sys.set_int_max_str_digits),
)
