"""Extra time over budget, with a lower bound for every schedule; and memory over the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rockmate.errors import InfeasibleBudgetError, MissingExtraError, SolverError
from rockmate.planners import plan
from rockmate.planners.smallest_budget import low_memory_plan
from rockmate.problems.problem import Problem
from rockmate.reports.modules import columns
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


_COLOURS = {"forward": "#3b7dd8", "recomputation": "#e08a1e", "backward": "#3a9d78"}
_COLOURS["waiting"] = "#b9bdc7"
_MIB = 1 << 20


def memory_figure(problem: Problem, plan: Plan) -> Any:
    """Return a figure of memory over the step, with the budget, in MiB and ms."""
    try:
        import numpy as np
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("rk.plan.plot()", "matplotlib", "plot") from error

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    found = columns(problem, plan)
    for kind, bars in found.kinds.items():
        if bars:
            begins, ends, heights = map(np.array, zip(*bars, strict=True))
            widths, colour = ends - begins, _COLOURS[kind]
            axes.bar(begins, heights / _MIB, widths, align="edge", color=colour, label=kind)
    if found.elsewhere:
        begins, ends, heights = map(np.array, zip(*found.elsewhere, strict=True))
        edges = [*begins, ends[-1]]
        axes.stairs(heights / _MIB, edges, color="#8a4fbf", lw=1.5, label="elsewhere")
    axes.axhline(plan.budget_bytes / _MIB, color="#c22f3d", linestyle="--", label="budget")
    axes.set(xlabel="time in the step (ms)", ylabel="memory (MiB)", xlim=(0, found.end_ms or 1))
    axes.legend(loc="lower center", ncols=6, fontsize="small", bbox_to_anchor=(0.5, 1.0))
    return figure
