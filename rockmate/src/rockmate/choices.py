"""What a user may choose by name, checked before any work is done."""

from __future__ import annotations

from rockmate.errors import UnknownChoiceError
from rockmate.planners.effort import effort_of
from rockmate.planners.portfolio import check_planner
from rockmate.solvers import check_backend

COSTS = ("measured", "flops")


def check_choices(
    *,
    cost: str = "measured",
    effort: str | float = "fast",
    planner: str = "auto",
    backend: str = "cp-sat",
) -> None:
    """Refuse what planning would refuse later, after the module was captured and measured.

    Raises:
        UnknownChoiceError: one of them is unknown; it names the choices.
        SolverUnavailableError: the backend is not installed.
    """
    if cost not in COSTS:
        raise UnknownChoiceError("cost", cost, COSTS)
    effort_of(effort)
    check_planner(planner)
    check_backend(backend)
