"""What can go wrong, as exceptions that carry data.

Each text has three parts: what was asked, what was found, what to do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from rkgb.errors import (
    RockmateError as RockmateError,
)  # of rkgb's errors, too: one name catches all


class ArgumentsError(RockmateError, ValueError, TypeError):
    """A function was called with arguments that it does not take, or not together."""


class MissingExtraError(RockmateError, ImportError):
    """Something needs a package that is not installed; `extra` is the extra that brings it."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        self.what = what
        self.package = package
        self.extra = extra
        super().__init__(
            f"{what} needs {package}. Install it: pip install 'rockmate[{extra}]', or pip install "
            f"{package}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self.package, self.extra), vars(self)


class UnknownChoiceError(RockmateError, ValueError):
    """An option was given a value that it does not know; `choices` are the names that it knows."""

    def __init__(
        self, option: str, asked: object, choices: Iterable[str], otherwise: str = ""
    ) -> None:
        self.option = option
        self.asked = asked
        self.choices = tuple(choices)
        self.otherwise = otherwise  # what else may be given, in words
        names = ", ".join(self.choices)
        known = f"{names}, or {otherwise}" if otherwise else f"one of {names}"
        super().__init__(f"{option} {asked!r} is unknown; choose {known}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.option, self.asked, self.choices, self.otherwise), vars(self)


# --- planning -------------------------------------------------------------------------------------


class InfeasibleBudgetError(RockmateError, ValueError, RuntimeError):
    """No plan was found for the budget. What looks for a batch size takes it for out of memory.

    `minimum_bytes` is the smallest budget that is accepted, because there is a plan for it; with
    `effort="best"` it may be smaller. No budget below `bound_bytes` can ever be accepted.
    """

    def __init__(
        self, message: str, *, asked_bytes: int, minimum_bytes: int, bound_bytes: int = 0
    ) -> None:
        super().__init__(message)
        self.asked_bytes = asked_bytes
        self.minimum_bytes = minimum_bytes
        self.bound_bytes = bound_bytes
        self.whole: tuple[str, ...] = ()  # submodules that run whole in what was planned

    def __reduce__(self) -> tuple[Any, ...]:
        # Without it a copy, or an unpickled error of a worker, would be made from `args` alone.
        make = functools.partial(
            type(self),
            asked_bytes=self.asked_bytes,
            minimum_bytes=self.minimum_bytes,
            bound_bytes=self.bound_bytes,
        )
        return make, self.args, vars(self)


class InvalidPlanError(RockmateError, ValueError):
    """A sequence of steps does not compute what it must, or does not belong to the problem."""


class PlanFileError(InvalidPlanError):
    """A file of plans that cannot be read or written, is none, or whose plans do not hold."""


class PlanMismatchError(InvalidPlanError):
    """A plan in a file is for something else; `differences` says for what, in words."""

    def __init__(self, message: str, differences: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.differences), vars(self)


class PlanSharingError(RockmateError, RuntimeError):
    """Planning has failed on one process of a group; all of them get the same text."""


class SolverError(RockmateError, RuntimeError):
    """A solver stopped without an answer for a reason that is not the budget."""


class SolverUnavailableError(SolverError, ImportError):
    """A solver backend that was asked for is not installed or not licensed."""


# --- capture and execution ------------------------------------------------------------------------


class UnsupportedModuleError(RockmateError, ValueError):
    """The module or its state cannot be run exactly; the text says what was found and where."""


class BudgetFormatError(RockmateError, ValueError):
    """A budget that cannot be read."""


class InputMismatchError(RockmateError, ValueError):
    """A call whose inputs, or whose module's state, differ from what was planned for."""


class SelfTestError(RockmateError, RuntimeError):
    """The planned module does not agree with eager PyTorch; it must not be used."""


class BackwardTwiceError(RockmateError, RuntimeError):
    """A second backward through one forward."""


class DoubleBackwardError(RockmateError, RuntimeError):
    """A backward whose result should be differentiated again."""


class ChangedTensorError(RockmateError, RuntimeError):
    """A tensor that backward needs was changed in place after the forward."""
