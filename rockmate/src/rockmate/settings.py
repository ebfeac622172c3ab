"""What a user may choose: a budget and names, each read or refused before any work is done.

A budget is bytes, text with a unit, or a fraction of eager's activation peak.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

from rockmate.errors import BudgetFormatError, UnknownChoiceError
from rockmate.planners.effort import effort_of
from rockmate.planners.portfolio import check_planner
from rockmate.solvers import check_backend

Budget = int | float | str
COSTS = ("measured", "flops")
SelfTest = bool | Literal["deterministic"]
SELF_TESTS = (True, False, "deterministic")

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KIB": 1024,
    "MIB": 1024**2,
    "GIB": 1024**3,
    "TIB": 1024**4,
}
_FORMS = "an int (bytes), a float in (0, 1] (fraction of eager's activation peak), or text such as "
_FORMS += "'2GiB', '800 MB' or '40%'"


@dataclass(frozen=True)
class Settings:
    """How to plan; see `Rockmate` for what the fields mean."""

    budget: Budget
    effort: str | float = "fast"
    cost: Literal["measured", "flops"] = "measured"
    self_test: SelfTest = True
    reserve_bytes: int = 0
    planner: str = "auto"
    backend: str = "cp-sat"
    progress: bool | None = None  # where a person is looking
    max_plans: int = 16
    opaque: tuple[str, ...] = ()
    strict: bool = False
    compile: bool = False
    most_kept_bytes: int | None = None  # of a module among others: from its forward to its backward
    plan: str | None = None  # path of a file of plans
    cache: bool | str | None = None
    share: bool = True


def check_choices(
    *,
    cost: str = "measured",
    effort: str | float = "fast",
    planner: str = "auto",
    backend: str = "cp-sat",
    self_test: SelfTest = True,
    compile: bool = False,
) -> None:
    """Refuse what planning would refuse later, after the module was captured and measured.

    Raises:
        UnknownChoiceError: one of them is unknown; it names the choices.
        SolverUnavailableError: the backend is not installed.
    """
    if cost not in COSTS:
        raise UnknownChoiceError("cost", cost, COSTS)
    if self_test not in SELF_TESTS:
        raise UnknownChoiceError("self_test", str(self_test), tuple(map(str, SELF_TESTS)))
    if not isinstance(compile, bool):
        raise UnknownChoiceError("compile", compile, ("True", "False"))
    effort_of(effort)
    check_planner(planner)
    check_backend(backend)


def parse_budget(budget: Budget) -> tuple[int | None, float | None]:
    """Return (bytes, None) or (None, fraction of eager's activation peak).

    Bytes round down. Units follow the standard: GB is 10^9 bytes, GiB is 2^30.

    Raises:
        BudgetFormatError: the value is not positive, a float above 1, or unreadable.
    """
    if isinstance(budget, bool) or not isinstance(budget, (Real, str)):
        raise BudgetFormatError(f"budget {budget!r} is a {type(budget).__name__}. Give {_FORMS}.")
    if isinstance(budget, str):
        return _from_text(budget)
    if not budget > 0:
        raise BudgetFormatError(f"budget {budget!r} is not positive. Give {_FORMS}.")
    if isinstance(budget, Integral):
        return int(budget), None
    if budget > 1:
        raise BudgetFormatError(
            f"budget {budget!r} is a float above 1, which could mean bytes or a factor. "
            f"Give {_FORMS}."
        )
    return None, float(budget)


def _from_text(text: str) -> tuple[int | None, float | None]:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*(%|[A-Za-z]*)\s*", text)
    if match is None:
        raise BudgetFormatError(f"budget {text!r} cannot be read. Give {_FORMS}.")
    number, unit = float(match.group(1)), match.group(2)
    if unit == "%":
        if not 0 < number <= 100:
            raise BudgetFormatError(f"budget {text!r} is not in (0 %, 100 %]. Give {_FORMS}.")
        return None, number / 100
    if unit.upper() not in _UNITS:
        raise BudgetFormatError(f"budget {text!r} has an unknown unit '{unit}'. Give {_FORMS}.")
    size = int(number * _UNITS[unit.upper()])
    if size <= 0:
        raise BudgetFormatError(f"budget {text!r} is not positive. Give {_FORMS}.")
    return size, None
