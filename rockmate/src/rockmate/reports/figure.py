"""Memory over the step as a figure of matplotlib, for notebooks and papers."""

from __future__ import annotations

from typing import Any

from rockmate.errors import MissingExtraError
from rockmate.problems.problem import Problem
from rockmate.reports.modules import phases
from rockmate.schedules.plan import Plan
from rockmate.schedules.simulate import simulate

_COLOURS = {"forward": "#3b7dd8", "recomputation": "#e08a1e", "backward": "#3a9d78"}
_MIB = 1 << 20


def memory_figure(problem: Problem, plan: Plan) -> Any:
    """Return a figure of memory over the step, with the budget, in MiB and ms."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("rk.plan.plot()", "matplotlib", "plot") from error

    timeline = simulate(problem, plan.steps, plan.moves)
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    columns: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in _COLOURS}
    now = 0.0
    for (kind, ms), peak in zip(phases(problem, plan.steps), timeline.peak_during, strict=True):
        columns[kind].append((now, ms, peak / _MIB))
        now += ms
    for kind, bars in columns.items():
        if bars:
            begins, widths, heights = zip(*bars, strict=True)
            axes.bar(begins, heights, widths, align="edge", color=_COLOURS[kind], label=kind)
    axes.axhline(plan.budget_bytes / _MIB, color="#c22f3d", linestyle="--", label="budget")
    axes.set(xlabel="time in the step (ms)", ylabel="memory (MiB)", xlim=(0, now or 1))
    axes.legend(loc="lower center", ncols=4, fontsize="small", bbox_to_anchor=(0.5, 1.0))
    return figure
