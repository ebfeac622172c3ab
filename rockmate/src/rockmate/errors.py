"""The errors of rockmate, which carry data.

Each text has three parts: what was asked, what was found, what to do.
"""

from __future__ import annotations

from collections.abc import Iterable

# Of rkgb's errors, too: one name catches all.
from rkgb.errors import RockmateError as RockmateError


class ArgumentsError(RockmateError, ValueError, TypeError):
    """A function was called with unknown arguments, or with arguments that exclude each other."""


class MissingExtraError(RockmateError, ImportError):
    """A feature needs a package that is not installed; `extra` is the extra that installs it."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        self.what = what
        self.package = package
        self.extra = extra
        super().__init__(
            f"{what} needs {package}. Install it: pip install 'rockmate[{extra}]', or pip install "
            f"{package}"
        )


class UnknownChoiceError(RockmateError, ValueError):
    """An option was given an unknown value; `choices` are the known ones."""

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


# --- planning -------------------------------------------------------------------------------------


class InfeasibleBudgetError(RockmateError, ValueError, RuntimeError):
    """No plan was found for the budget. Searches for a batch size treat it as out of memory.

    `minimum_bytes` is the smallest budget that is accepted, because there is a plan for it; with
    `effort="best"` it may be smaller. No budget below `bound_bytes` can be feasible.
    """

    def __init__(
        self, message: str, *, asked_bytes: int, minimum_bytes: int, bound_bytes: int = 0
    ) -> None:
        super().__init__(message)
        self.asked_bytes = asked_bytes
        self.minimum_bytes = minimum_bytes
        self.bound_bytes = bound_bytes
        self.whole: tuple[str, ...] = ()  # opaque calls in the plan

    def reworded(self, message: str, **instead: int) -> InfeasibleBudgetError:
        """Return the same refusal in other words, perhaps with other bytes."""
        names = ("asked_bytes", "minimum_bytes", "bound_bytes")
        made = InfeasibleBudgetError(
            message, **{name: vars(self)[name] for name in names} | instead
        )
        made.whole = self.whole
        return made


class InvalidPlanError(RockmateError, ValueError):
    """A sequence of steps is invalid, or does not belong to the problem."""


class PlanFileError(InvalidPlanError):
    """A plan file cannot be read or written, is no such file, or has invalid plans."""


class PlanMismatchError(InvalidPlanError):
    """A plan in a file is for another call, device or version; `differences` are in words."""

    def __init__(self, message: str, differences: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)

    @classmethod
    def of_saved(cls, what: str, differences: Iterable[str]) -> PlanMismatchError:
        """Return the error for a saved plan that is not for `what`."""
        return cls(
            f"the saved plan is not for {what}: {'; '.join(differences)}. Leave `plan` out to plan "
            "anew, and save that plan",
            differences,
        )


class PlanSharingError(RockmateError, RuntimeError):
    """Planning has failed on one process of a group; all of them get the same text."""


class SolverError(RockmateError, RuntimeError):
    """A solver stopped without an answer for a reason that is not the budget."""


class SolverUnavailableError(SolverError, ImportError):
    """The chosen solver backend is not installed or not licensed."""


# --- capture and execution ------------------------------------------------------------------------


class UnsupportedModuleError(RockmateError, ValueError):
    """The module or its state cannot be run exactly; the text says what was found and where."""


class OtherForwardError(UnsupportedModuleError):
    """A forward runs other operations than the recorded one, in the submodule at `module_path`."""

    def __init__(self, message: str, difference: str, module_path: str) -> None:
        super().__init__(message)
        self.difference, self.module_path = difference, module_path


class BudgetFormatError(RockmateError, ValueError):
    """A budget that cannot be read."""


class InputMismatchError(RockmateError, ValueError):
    """The inputs of a call, or the state of the module, differ from the planned ones."""


class SelfTestError(RockmateError, RuntimeError):
    """The planned module does not agree with eager PyTorch; it must not be used."""


class BackwardTwiceError(RockmateError, RuntimeError):
    """A second backward through one forward."""


class DoubleBackwardError(RockmateError, RuntimeError):
    """A backward with create_graph=True."""


class ChangedTensorError(RockmateError, RuntimeError):
    """A tensor that backward needs was changed in place after the forward."""
