"""Functions written in C by which Python reads what no guard can look at, or by names it has made.

What is asked of the system (files, clocks, threads, other frames) may be otherwise at every call,
and nothing says when; so what asks runs whole. Which attributes `vars` and its like lead to is not
written in the code; so all of them count. How torch is set can be asked again.
"""

from __future__ import annotations

import builtins
import functools
import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from enum import Enum
from types import FrameType, ModuleType
from typing import Any

import torch

from rkgb.guards.holding import PLAIN
from rkgb.guards.owners import hands_on, is_users
from rkgb.torch_api.private.flags import named_kernel_flags

_TORCHS = "torch._C"
# Of the module that asks the system, what gives the same at every call, or changes nothing seen.
_STEADY = frozenset(("fspath", "getpid", "getppid", "cpu_count", "strerror", "close", "_exit"))
_CLOCKS = frozenset(
    (
        *("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns"),
        *("process_time", "process_time_ns", "thread_time", "thread_time_ns", "clock_gettime"),
        *("localtime", "gmtime", "ctime", "strftime", "times"),
    )
)

# Keys have them.
_MODES = ("autocast", "grad_enabled", "inference_mode", "torch_function", "tracing")


class Door(Enum):
    """What comes through a function written in C."""

    SYSTEM = "what nobody can look at again"
    DIRECT = "the same, if the user's own code asks for it"
    NAMES = "attributes by whatever names there are"
    TORCH = "how torch is set"

    def reader(self, frame: FrameType | None) -> FrameType | None:
        """Return the frame of the user's that a call is for; None where it is a library's own."""
        while frame is not None:
            name = frame.f_globals.get("__name__")
            if is_users(name) and not frame.f_code.co_filename.startswith("<frozen"):
                is_import = frame.f_code.co_name == "<module>"
                return None if is_import else frame
            if self is Door.DIRECT or not (hands_on(name) or self is Door.TORCH):
                return None
            frame = frame.f_back
        return None


def _home(called: Any) -> str:
    own = getattr(called, "__self__", None)
    if isinstance(own, ModuleType):
        return own.__name__
    if called.__name__.startswith(("__reduce", "__getstate")):
        return "builtins.object"
    if isinstance(own, type):
        is_method = called.__name__ in vars(type)
        return "builtins.type" if is_method else f"{own.__module__}.{own.__qualname__}"
    if own is None or type(own).__name__ == "PyCapsule":
        return str(called.__module__)
    return f"{type(own).__module__}.{type(own).__qualname__}"


def _doors() -> dict[str, dict[str, Door]]:
    """Return the doors by name, and by where they are found."""
    found: dict[str, dict[str, Door]] = {}

    def add(home: str, names: Iterable[str], door: Door) -> None:
        for name in names:
            found.setdefault(name, {})[home] = door

    system, direct, names = Door.SYSTEM, Door.DIRECT, Door.NAMES
    posix = sys.modules[os.stat.__module__]
    add(posix.__name__, (n for n in vars(posix) if n not in _STEADY), system)
    add("time", _CLOCKS, system)
    add(_home(open), ("open", "open_code"), system)  # "io", or "_io" from Python 3.12 on
    add("gc", (n for n in vars(gc) if n.startswith("get_") or n == "isenabled"), system)
    add("_thread", ("get_ident", "get_native_id"), system)
    add("builtins.type", ("__subclasses__",), system)
    add("torch._C.Generator", ("initial_seed", "get_state", "seed"), system)
    add("random.Random", ("getstate",), system)
    for kind in ("date", "datetime"):
        add(f"datetime.{kind}", ("now", "today", "utcnow"), system)
    frames = ("_getframe", "_current_frames", "getrefcount", "gettrace", "getprofile")
    limits = ("getrecursionlimit", "getallocatedblocks", "get_asyncgen_hooks")
    add("sys", (*frames, *limits), direct)
    add("builtins", ("eval", "exec", "globals", "__import__"), direct)
    add("builtins", ("vars", "dir"), names)
    add("_pickle", ("dumps", "dump"), names)
    for home in ("builtins.object", "copyreg"):
        add(home, ("__reduce_ex__", "__reduce__", "__getstate__"), names)
    getters = (n for n in dir(torch._C) if n.lstrip("_").startswith(("is_", "get_")))
    known = named_kernel_flags()
    others = (n for n in getters if n.removeprefix("_get_") not in known)
    add(_TORCHS, (n for n in others if not any(m in n for m in _MODES)), Door.TORCH)
    return found


_DOORS = _doors()


def door_of(called: Any) -> Door | None:
    """Return the door that a function written in C is, if it is one."""
    homes = _DOORS.get(called.__name__)
    if homes is None:
        return None
    is_torchs = _TORCHS in homes and called is getattr(torch._C, called.__name__)
    return homes[_TORCHS] if is_torchs else homes.get(_home(called))


@functools.cache
def says(name: str) -> Callable[[], Any] | None:
    """Return the function of torch of this name, if it says something plain, and needs nothing."""
    function: Any = getattr(torch._C, name, None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return function if isinstance(function(), PLAIN) else None
    except Exception:  # it takes arguments, or is not for this machine
        return None


def told(called: Any, line: int) -> str:
    """Return a function and where it was called in words."""
    home = _home(called)
    name = called.__name__ if home == builtins.__name__ else f"{home}.{called.__name__}"
    return f"'{name}' (line {line})"
