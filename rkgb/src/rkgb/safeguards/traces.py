"""Keeps what runs once more from leaving traces outside of the process.

The forward of a user may print, log, write files and set variables of the environment. It runs more
often than the user has called it, while it is planned and where a part is computed again, so that
all this would be there more often than in plain PyTorch. The first run of a step leaves all of it,
as the parts that do so run whole.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch

from rkgb.errors import NoStepError
from rkgb.guards import Door, is_users
from rkgb.module_state.start_of_call import numpy_state
from rkgb.safeguards.interrupts import signals_wait
from rkgb.safeguards.other_threads import same_state
from rkgb.safeguards.process_settings import process_settings
from rkgb.torch_api.patches import Patches
from rkgb.torch_api.quiet import printing_to, without_prints

# Of libraries, what opens the files that a user names. Others' own files are left alone: compiled
# code, caches.
_OPEN_FOR_USERS = frozenset(("numpy", "pathlib", "gzip", "codecs", "pandas", "PIL"))
# Loggers whose messages are not the user's.
_APART = frozenset(("rkgb", "rockmate", "rotor", "torch"))
# What changes files or the like, with how many paths it takes first.
_CHANGES = {
    name: paths
    for name, paths in {
        **dict.fromkeys(("mkdir", "rmdir", "remove", "unlink", "truncate", "chmod", "chown"), 1),
        **dict.fromkeys(("utime", "mkfifo", "mknod", "lchown", "system"), 1),
        **dict.fromkeys(("rename", "replace", "link", "symlink"), 2),
    }.items()
    if hasattr(os, name)
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND


@contextlib.contextmanager
def without_traces(
    said: Callable[[str, Callable[[], object]], object] | None = None,
) -> Iterator[Callable[[str], contextlib.AbstractContextManager[None]]]:
    """While active, what this thread does leaves nothing outside of the process.

    Prints and messages to loggers are dropped, the user's files to write are the null device, what
    changes files changes none, and the environment and settings of the process are put back in the
    end. What starts processes or connections is refused. `said` gets what loggers would have put
    out, and how; then prints are the caller's matter. What it yields is for the code of a module
    that is imported by this name: it runs once, and leaves what it leaves.
    """
    put_settings_back = process_settings()
    variables: dict[str, str | None] = {}  # of the environment, as they were
    streams = sys.stdout, sys.stderr  # the second is where our own messages go

    @contextlib.contextmanager
    def importing(name: str) -> Iterator[None]:
        before = _drawn()
        with patches.undone(), printing_to(streams[0]), printing_to(streams[1], "stderr"):
            yield
        if not all(map(same_state, before, _drawn())):
            raise NoStepError.to_capture(
                "the model",
                f"import '{name}' before it is planned",
                "its forward imports this module for the first time, and that draws random "
                "numbers, or seeds: its first step alone would",
            )

    def log(logger: logging.Logger, record: logging.LogRecord) -> None:
        if logger.name.partition(".")[0] in _APART:
            with printing_to(streams[1], "stderr"):
                call_handlers(logger, record)
        elif said is not None and _is_put_out(logger, record):
            said(f"{record.getMessage()}\n", partial(logger.callHandlers, record))

    def set_variable(name: Any, value: Any) -> None:
        _keep(name, variables)
        put(name, value)

    def delete_variable(name: Any) -> None:
        _keep(name, variables)
        remove(name)

    def set_mask(mask: int) -> int:
        masks.append(set_mask_now(mask))
        return masks[-1]

    masks: list[int] = []  # those before; only a change says what it was
    call_handlers, set_mask_now = logging.Logger.callHandlers, os.umask
    put, remove = os.putenv, os.unsetenv
    patches = Patches(
        (
            (logging.Logger, "callHandlers", log),
            (os, "putenv", set_variable),
            (os, "unsetenv", delete_variable),
            (os, "umask", set_mask),
            (os, "open", _opening_by_flags(os.open)),
            (torch, "save", _saving(torch.save)),
            *((os, name, _doing_nothing(getattr(os, name), n)) for name, n in _CHANGES.items()),
            *((place, n, _refusing(getattr(place, n))) for place, n in _starts()),
            *((place, "open", _opening(io.open)) for place in (builtins, io)),
        )
    )
    try:
        with signals_wait(), patches, contextlib.ExitStack() as stack:
            for name in ("stdout", "stderr") if said is None else ():
                stack.enter_context(without_prints(name))
            yield importing
    finally:
        put_settings_back()
        for mask in masks[:1]:
            os.umask(mask)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _drawn() -> tuple[Any, ...]:
    """Return the states of the generators of random numbers that all share."""
    return (torch.get_rng_state(),), random.getstate(), numpy_state()


def _keep(name: Any, variables: dict[str, str | None]) -> None:
    known = os.fsdecode(name)
    variables.setdefault(known, os.environ.get(known))


def _is_put_out(logger: logging.Logger, record: logging.LogRecord) -> bool:
    """Return whether a handler would put out a message, as `logging` looks for one."""
    around: logging.Logger | None = logger
    found = list[logging.Handler]()
    while around is not None:
        found += around.handlers
        around = around.parent if around.propagate else None
    if not found and logging.lastResort is not None:
        found.append(logging.lastResort)
    return any(
        record.levelno >= handler.level and not isinstance(handler, logging.NullHandler)
        for handler in found
    )


def _is_for_users(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")
    return is_users(name) or str(name).partition(".")[0] in _OPEN_FOR_USERS


def _opening(before: Callable[..., Any]) -> Callable[..., Any]:
    def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = not isinstance(file, int) and not {*mode}.isdisjoint("wax+")
        if writes and kwargs.get("opener") is None and _is_for_users(sys._getframe(2)):
            file, mode = os.devnull, mode.replace("x", "w")
        return before(file, mode, *args, **kwargs)

    return open_file


def _opening_by_flags(before: Callable[..., int]) -> Callable[..., int]:
    def open_file(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & _WRITES and _is_for_users(sys._getframe(2)):
            return before(os.devnull, flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
        return before(path, flags, *args, **kwargs)

    return open_file


def _doing_nothing(before: Callable[..., Any], paths: int) -> Callable[..., Any]:
    def change(*args: Any, **kwargs: Any) -> Any:
        if Door.SYSTEM.reader(sys._getframe(2)) is None:
            return before(*args, **kwargs)
        # Without a path it changes nothing, and is seen to be called.
        with contextlib.suppress(OSError):
            return before(*[""] * paths, *args[paths:])
        return None

    return change


def _starts() -> Iterator[tuple[Any, str]]:
    """Yield what starts processes, or connects to others."""
    yield from ((os, name) for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp"))
    for module, kind, names in (
        ("subprocess", "Popen", ("__init__",)),
        ("socket", "socket", ("connect", "connect_ex")),
    ):
        found = getattr(sys.modules.get(module), kind, None)
        yield from ((found, name) for name in names if found is not None)


def _refusing(before: Callable[..., Any]) -> Callable[..., Any]:
    def start(*args: Any, **kwargs: Any) -> Any:
        frame = Door.SYSTEM.reader(sys._getframe(2))
        if frame is None:
            return before(*args, **kwargs)
        place = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        raise NoStepError.to_capture(
            "the model",
            "do it outside of forward, and pass what it gives as an argument",
            f"its forward starts a process or a connection ('{before.__qualname__}'), which "
            "planning would do more often than its steps",
            place,
        )

    return start


def _saving(before: Callable[..., Any]) -> Callable[..., Any]:
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        before(obj, io.BytesIO() if isinstance(f, (str, os.PathLike)) else f, *args, **kwargs)

    return save
