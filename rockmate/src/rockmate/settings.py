"""What a user may choose: a budget and names, each read or refused before any work is done.

A budget is bytes, text with a unit, or a fraction of eager's activation peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rockmate.errors import BudgetFormatError, UnknownChoiceError
from rockmate.planners.effort import effort_of
from rockmate.planners.portfolio import check_planner
from rockmate.solvers import check_backend

Budget = int | float | str
COSTS = ("measured", "flops")
SelfTest = bool | Literal["deterministic"]
SELF_TESTS = (True, False, "deterministic")

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
    check_every: int = 0  # calls, of which one is recorded once more; 0: only the first ones are


def check_choices(
    *,
    cost: str = "measured",
    effort: str | float = "fast",
    planner: str = "auto",
    backend: str = "cp-sat",
    self_test: SelfTest = True,
    compile: bool = False,
    check_every: int = 0,
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
    if isinstance(check_every, bool) or not isinstance(check_every, int) or check_every < 0:
        raise UnknownChoiceError("check_every", check_every, ("0", "a number of calls"))
    effort_of(effort)
    check_planner(planner)
    check_backend(backend)


def parse_budget(budget: Budget) -> tuple[int | None, float | None]:
    """Return (bytes, None) or (None, fraction of eager's activation peak).

    Bytes round down. Units follow the standard: G and GB are 10^9 bytes, Gi and GiB are 2^30. Text
    without a unit is a fraction ("0.6"), or bytes where nothing else can be meant ("1_000_000").

    Raises:
        BudgetFormatError: the value is not positive, a float above 1, or unreadable.
    """
    from rotor import MemoryLimitFormatError, parse_limit  # only now, as it takes its core along

    try:
        found = parse_limit(budget)
    except MemoryLimitFormatError as error:
        raise BudgetFormatError(f"budget {budget!r} {error.problem}. Give {_FORMS}.") from None
    return (None, found) if isinstance(found, float) else (found, None)
