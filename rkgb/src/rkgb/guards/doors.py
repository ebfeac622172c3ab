"""Functions written in C by which Python reads what no guard can look at, or by names it has made.

What is asked of the system (files, clocks, threads, other frames) may be otherwise at every call,
and nothing says when; so what asks runs whole. So does what calls a function of a module that
nothing is known of: what it reads and changes is written in C. Which attributes `vars` and its like
lead to is not written in the code; so all of them count. How torch is set can be asked again.
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
from types import (
    ClassMethodDescriptorType,
    FrameType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from rkgb.guards.holding import PLAIN
from rkgb.guards.owners import hands_on, is_pythons, is_users
from rkgb.torch_api.private.flags import named_kernel_flags

_TORCHS = "torch._C"
_IN_C = (MethodDescriptorType, ClassMethodDescriptorType, WrapperDescriptorType)
# Of the module that asks the system, what gives the same at every call, or changes nothing seen.
_STEADY = frozenset(("fspath", "getpid", "getppid", "cpu_count", "strerror", "close", "_exit"))
_CLOCKS = frozenset(
    (
        *("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns"),
        *("process_time", "process_time_ns", "thread_time", "thread_time_ns", "clock_gettime"),
        *("localtime", "gmtime", "ctime", "strftime", "times"),
    )
)
# What is written in C in these gives the same for the same arguments, or is listed here; what their
# objects hold is looked at as values (`watched.py`), or is known to be used up.
_STEADY_MODULES = frozenset(
    (
        *("builtins", "types", "typing", "_typing", "sys", "gc", "_abc", "_ast", "_opcode", "_imp"),
        *("math", "cmath", "_operator", "operator", "_functools", "functools", "itertools"),
        *("_collections", "collections", "_weakref", "weakref", "_contextvars", "_thread"),
        *("array", "_array", "_struct", "_ctypes", "mmap", "_bisect", "_heapq", "_statistics"),
        *("_json", "_pickle", "copyreg", "marshal", "_sre", "re", "_string", "unicodedata"),
        *("_codecs", "binascii", "zlib", "_bz2", "_lzma", "_stat", "errno", "_warnings"),
        *("decimal", "_decimal", "datetime", "_datetime", "time", "_random", "random", "_io", "io"),
        *("posix", "nt", "_hashlib", "_md5", "_sha1", "_sha2", "_sha256", "_sha512", "_sha3"),
        *("_blake2", "_asyncio", "_tokenize", "_symtable", "_interpreters"),
        *("pydantic_core", "_pydantic_core"),
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


def _holder(called: Any) -> Any:
    """Return the module or the class that a function was found in; None if it has none."""
    try:
        own = called.__self__  # not by `getattr`, which is watched as the user's
    except AttributeError:
        own = None
    kind = type(own)  # not `isinstance`, which asks objects what they are
    if issubclass(kind, ModuleType):
        return own
    if own is None or kind.__name__ == "PyCapsule":
        return getattr(called, "__objclass__", None)
    if issubclass(kind, type):
        return kind if called.__name__ in vars(type) else own
    return kind


def _home(called: Any, holder: Any) -> str:
    if holder is None:
        return str(called.__module__)
    if isinstance(holder, ModuleType):
        return holder.__name__
    name = called.__name__
    if name.startswith(("__reduce", "__getstate")):
        return "builtins.object"
    # A method of a class that derives from it, which is written in Python, may have the name, too.
    entries = (vars(base).get(name) for base in holder.__mro__)
    kind = next((entry.__objclass__ for entry in entries if isinstance(entry, _IN_C)), holder)
    return f"{kind.__module__}.{kind.__qualname__}"


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
    files = _home(open, _holder(open))  # "io", or "_io" from Python 3.12 on
    add(files, ("open", "open_code"), system)
    add("gc", (n for n in vars(gc) if n.startswith("get_") or n == "isenabled"), system)
    add("_thread", ("get_ident", "get_native_id"), system)
    for kind in ("lock", "RLock"):
        add(f"_thread.{kind}", ("locked", "_is_owned"), system)
    add("builtins.type", ("__subclasses__",), system)
    add("torch._C.Generator", ("initial_seed", "get_state", "seed"), system)
    add("_random.Random", ("getstate",), system)
    for kind in ("date", "datetime"):
        add(f"datetime.{kind}", ("now", "today", "utcnow"), system)
    frames = ("_getframe", "_current_frames", "getrefcount", "gettrace", "getprofile")
    limits = ("getrecursionlimit", "getallocatedblocks", "get_asyncgen_hooks")
    sets = ("setrecursionlimit", "setswitchinterval", "set_int_max_str_digits", "setdlopenflags")
    add("sys", (*frames, *limits, *sets), direct)
    add("gc", ("disable", "enable", "freeze", "set_debug", "set_threshold", "unfreeze"), direct)
    add("_thread", ("stack_size",), direct)
    add("builtins", ("eval", "exec", "globals", "__import__", "id"), direct)
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
# Who asks how torch is set may be a library, for the user's code around it.
_TORCHS_NAMES = frozenset(name for name, homes in _DOORS.items() if _TORCHS in homes)
_found: dict[tuple[int, str], tuple[Any, Door | None]] = {}  # by the holder, which is kept alive
_MOST = 20_000


def door_of(called: Any) -> Door | None:
    """Return the door that a function written in C is, if it is one.

    Examples:
        >>> import _signal, math
        >>> door_of(math.sqrt), door_of(_signal.getsignal).name
        (None, 'SYSTEM')
    """
    holder = _holder(called)
    place = id(called.__module__ if holder is None else holder), called.__name__
    known = _found.get(place)
    if known is None:
        while len(_found) >= _MOST:
            del _found[next(iter(_found))]
        kept = called.__module__ if holder is None else holder
        known = _found[place] = kept, _look_up(called, holder)
    return known[1]


def is_of_library(frame: FrameType, called: Any) -> bool:
    """Whether a library calls a function written in C for itself, so that no door matters."""
    name = frame.f_globals.get("__name__")
    return not (is_users(name) or hands_on(name) or called.__name__ in _TORCHS_NAMES)


def _look_up(called: Any, holder: Any) -> Door | None:
    home, homes = _home(called, holder), _DOORS.get(called.__name__, {})
    if _TORCHS in homes and called is getattr(torch._C, called.__name__):
        return homes[_TORCHS]
    top = home.partition(".")[0]
    is_known = top in _STEADY_MODULES or not (is_users(top) or is_pythons(top))
    return homes.get(home) or (None if is_known else Door.SYSTEM)


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
    home = _home(called, _holder(called))
    name = called.__name__ if home == builtins.__name__ else f"{home}.{called.__name__}"
    return f"'{name}' (line {line})"
