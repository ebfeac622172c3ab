"""What rkgb refuses, and why. Each message says what was asked, what was found and what to do."""

from __future__ import annotations

import functools
from typing import Any


class RockmateError(Exception):
    """Base of every error that these packages raise on purpose: `rockmate.RockmateError`."""


class RkgbError(RockmateError):
    """Base class of every error that rkgb raises on purpose.

    `module_path` says in which submodule it arose, where one is to blame.
    """

    module_path: Any = None  # str where known


class TraceError(RkgbError, RuntimeError):
    """The module could not be captured as a graph; the cause is chained."""


class DataDependentError(TraceError):
    """The graph depends on the values in the input: control flow, sizes or Python numbers."""


class SideEffectError(TraceError):
    """The forward does something besides returning outputs that a graph cannot repeat."""


class BrokenPieceError(TraceError):
    """A submodule fails when it is run whole, so running more of it whole would not help."""


class UnsupportedOpError(RkgbError, ValueError):
    """An operation of the module cannot be placed exactly."""

    def __init__(self, message: str, *, op: str, module_path: str, source: str) -> None:
        super().__init__(message)
        self.op = op
        self.module_path: str = module_path
        self.source = source

    def __reduce__(self) -> tuple[Any, ...]:
        # Without it a copy, or an unpickled error of a worker, would be made from `args` alone.
        make = functools.partial(
            type(self), op=self.op, module_path=self.module_path, source=self.source
        )
        return make, self.args, vars(self)


class OpaquePieceError(RkgbError, RuntimeError):
    """A submodule that is run whole did not do what its results were recorded with."""

    def __init__(self, message: str, *, module_path: str) -> None:
        super().__init__(message)
        self.module_path: str = module_path

    def __reduce__(self) -> tuple[Any, ...]:
        make = functools.partial(type(self), module_path=self.module_path)
        return make, self.args, vars(self)


class OtherWayError(RkgbError, RuntimeError):
    """A step has gone another way than its recording; the plain module must run instead."""


class InvalidGraphError(RkgbError, ValueError):
    """A graph breaks one of its own rules, or eager PyTorch would refuse it too."""


class CompilerMissingError(RkgbError, RuntimeError):
    """Pieces were to be compiled, and what inductor needs for this device is not installed."""


class UnsupportedDeviceError(RkgbError, RuntimeError):
    """The device, or how it is used, does not let memory be counted or random numbers repeated."""
