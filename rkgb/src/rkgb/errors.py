"""The errors of rkgb. Each message says what was asked, what was found and what to do."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any, Self

_MOST_SHOWN = 60  # characters of a value
_PLACE = re.compile(r" \((\S+:\d+ .*|module '.*|in the backward .*)\)\.$", re.DOTALL)


def shown(value: Any) -> str:
    """Return a value as a message shows it; classes of users may fail to say what they are."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def without_advice(text: str) -> str:
    """Return what a message of `to_capture` says was found where, of another its first sentence."""
    do, _, found = text.partition("\n  Found: ")
    if not found:
        return text.partition(". ")[0].rstrip(".") + "."
    place = _PLACE.search(do)
    return found if place is None else f"{found.rstrip('.')} ({place[1]})."


def in_module(path: str) -> str:
    """Return the name of a place in a model, as messages say it."""
    return f"module '{path or '(root)'}'"


class _Stops(threading.local):
    """What has ended recordings in this thread since somebody began to note it."""

    found: list[BaseException] | None = None


_stops = _Stops()


@contextlib.contextmanager
def noting_stops() -> Iterator[list[BaseException]]:
    """Note what ends a recording inside, in the list that is yielded.

    An `except` of the forward may keep it from whoever called the forward, and go another way.
    """
    before, _stops.found = _stops.found, []
    try:
        yield _stops.found
    finally:
        _stops.found = before


def _note(stop: BaseException) -> None:
    if _stops.found is not None:
        _stops.found.append(stop)


class RockmateError(Exception):
    """Base of every error that these packages raise on purpose: `rockmate.RockmateError`."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Copying and unpickling set what an error carries, and do not call its `__init__` again.
        state = {**vars(self), "msg": self.msg} if isinstance(self, ImportError) else vars(self)
        return Exception.__new__, (type(self), *self.args), state


class RkgbError(RockmateError):
    """Base class of every error that rkgb raises on purpose.

    `module_path` is the submodule that caused it, if one did.
    """

    def __init__(self, *args: object, module_path: str | None = None) -> None:
        super().__init__(*args)
        self.module_path: Any = module_path  # str if known
        self.apart: tuple[str, ...] = ()  # submodules that failed, if the rest may run as it is
        _note(self)

    @classmethod
    def to_capture(cls, name: str, do: str, found: str, place: str = "", **known: Any) -> Self:
        """Return the error that says what to `do` to capture module `name`, where, and why."""
        where = f" ({place})" if place else ""
        return cls(f"to capture {name}, {do}{where}.\n  Found: {found}.", **known)


class TraceError(RkgbError, RuntimeError):
    """The module could not be captured as a graph; the cause is chained."""


class DataDependentError(TraceError):
    """The graph depends on the values in the input: control flow, sizes or Python numbers."""


class SideEffectError(TraceError):
    """The forward does something besides returning outputs that a graph cannot repeat."""


class ChangesArgumentsError(SideEffectError):
    """A module that cannot be recorded changes its arguments, so it cannot run whole either."""


class HookInsideError(SideEffectError):
    """A module that cannot be recorded has a forward hook inside, so it cannot run whole either.

    `hooked` is the path of the module with the hook, which the code around that module calls.
    """

    hooked = ""


class BrokenPieceError(TraceError):
    """An opaque call of a submodule fails, so an opaque call of a larger one would not help."""


class NoStepError(BrokenPieceError):
    """A forward does what no step can do, whether it is recorded or runs whole."""


class DrawsAgainError(NoStepError):
    """A checkpoint does not keep the random state: its second run would draw other numbers."""

    @classmethod
    def at(cls, name: str, place: str) -> Self:
        """Return the error for a model of this name, and a place where it draws."""
        return cls.to_capture(
            name,
            "leave preserve_rng_state at True",
            "its forward draws random numbers in a checkpoint that does not keep their state, so "
            "that plain PyTorch computes gradients with others than the forward's",
            place,
        )


class UnsupportedOpError(RkgbError, ValueError):
    """An operation of the module cannot be placed exactly."""

    def __init__(self, message: str, *, op: str, module_path: str, source: str) -> None:
        super().__init__(message, module_path=module_path)
        self.op = op
        self.source = source


class OpaquePieceError(RkgbError, RuntimeError):
    """An opaque call of a submodule did not behave as recorded."""


class OtherWayError(RkgbError, RuntimeError):
    """A guard fails during a step; the plain module must run instead."""


class InvalidGraphError(RkgbError, ValueError):
    """A graph violates an invariant, or eager PyTorch would refuse it too."""


class NotByPiecesError(Exception):
    """Operations cannot run piece by piece; the text says which, and why."""


class CopyError(RkgbError, RuntimeError):
    """What leaves the device could not be copied to its place, or back; `path` is that place."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class CompilerMissingError(RkgbError, RuntimeError):
    """Compilation was requested, and inductor's compiler for this device is not installed."""


class UnsupportedDeviceError(RkgbError, RuntimeError):
    """Memory cannot be counted, or random numbers not repeated, on this device or in this use."""


class StopsRecordingError(BaseException):
    """Ends an attempt to record, past every `except Exception` of the forward."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        _note(self)


class ReadsDataError(StopsRecordingError):
    """`what` (a decision of Python's, or a size) depends on values, perhaps in a backward."""

    def __init__(self, what: str, backward: str, module_path: str | None = None) -> None:
        super().__init__(what, backward)
        self.what, self.backward, self.module_path = what, backward, module_path


class WritesInputError(StopsRecordingError):
    """An operation writes to an input."""

    def __init__(self, name: str, operation: str, path: str, source: str) -> None:
        super().__init__(name, operation, path, source)
        self.name, self.operation, self.path, self.source = name, operation, path, source


class NeedsContentError(StopsRecordingError):
    """A value is read that was not computed, because its kernels were skipped."""


class OtherTangentsError(Exception):
    """Gradients come to opaque calls otherwise than in their trials, which are made again."""

    def __init__(self, tried: Any) -> None:
        super().__init__(tried)
        self.tried = tried  # what is known of the calls


class NotRecordedError(StopsRecordingError):
    """The forward does something that is no operation; `found` continues 'its forward …'."""

    def __init__(
        self,
        found: str,
        do: str = "move that out of its forward",
        module_path: str | None = None,  # if a backward does it
    ) -> None:
        super().__init__(found, do)
        self.found, self.do, self.module_path = found, do, module_path
