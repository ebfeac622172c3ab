"""What rkgb refuses, and why. Each message says what was asked, what was found and what to do."""

from __future__ import annotations

import functools
from typing import Any


class RkgbError(Exception):
    """Base class of every error that rkgb raises on purpose."""


class TraceError(RkgbError, RuntimeError):
    """The module could not be captured as a graph; the cause is chained."""


class DataDependentError(TraceError):
    """The graph depends on the values in the input: control flow, sizes or Python numbers."""


class SideEffectError(TraceError):
    """The forward does something besides returning outputs that a graph cannot repeat."""


class UnsupportedOpError(RkgbError, ValueError):
    """An operation of the module cannot be placed exactly."""

    def __init__(self, message: str, *, op: str, module_path: str, source: str) -> None:
        super().__init__(message)
        self.op = op
        self.module_path = module_path
        self.source = source

    def __reduce__(self) -> tuple[Any, ...]:
        # Without it a copy, or an unpickled error of a worker, would be made from `args` alone.
        make = functools.partial(
            type(self), op=self.op, module_path=self.module_path, source=self.source
        )
        return make, self.args, vars(self)


class InvalidGraphError(RkgbError, ValueError):
    """A graph breaks one of its own rules, or eager PyTorch would refuse it too."""
