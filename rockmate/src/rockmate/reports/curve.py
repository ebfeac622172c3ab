"""Extra time over budget: the cost of other budgets, and a lower bound for every schedule."""

from __future__ import annotations

from dataclasses import dataclass

from rockmate.errors import InfeasibleBudgetError, SolverError
from rockmate.planners import plan
from rockmate.planners.smallest_budget import low_memory_plan
from rockmate.problems.problem import Problem
from rockmate.schedules.baselines import keeping_all_bytes
from rockmate.schedules.plan import Plan

_QUICK = "segments"  # takes tenths of a second


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One budget: the overhead of a plan for it, and a proven lower bound for every plan.

    Both are fractions of the step without recomputation.
    """

    budget_bytes: int
    overhead: float
    bound: float


def overhead_curve(problem: Problem, found: Plan, *, points: int = 7) -> list[CurvePoint]:
    """Return points from a small budget to the one that keeps everything, including `found`'s.

    Overheads are those of a quick planner, and of `found` if it fits. A plan for less memory also
    serves for more, and a bound for more memory also holds for less. A point takes about half a
    second for 150 nodes.
    """
    everything = keeping_all_bytes(problem)
    least = min(low_memory_plan(problem)[1], found.peak_bytes)
    wanted = {least + (everything - least) * k // max(1, points - 1) for k in range(points)}
    plans = {budget: _quick(problem, budget) for budget in wanted - {found.budget_bytes}}
    plans[min(found.budget_bytes, everything)] = found
    bounds_ms: dict[int, float] = {}
    highest = 0.0
    for budget, plan_of_it in sorted(plans.items(), reverse=True):
        bound_ms = None if plan_of_it is None else plan_of_it.bound_ms
        highest = max(highest, (bound_ms or 0.0) - problem.base_time_ms)
        bounds_ms[budget] = highest
    base_ms = problem.base_time_ms or 1.0
    curve: list[CurvePoint] = []
    best_ms: float | None = None
    for budget, plan_of_it in sorted(plans.items()):
        fitting = [p.overhead_ms for p in (plan_of_it, found) if p and p.peak_bytes <= budget]
        best_ms = min((ms for ms in (best_ms, *fitting) if ms is not None), default=None)
        if best_ms is not None:
            bound = min(best_ms, bounds_ms[budget])
            curve.append(CurvePoint(budget, best_ms / base_ms, bound / base_ms))
    return curve


def _quick(problem: Problem, budget_bytes: int) -> Plan | None:
    try:
        return plan(problem, budget_bytes, effort="fast", planner=_QUICK)
    except (InfeasibleBudgetError, SolverError):
        return None
