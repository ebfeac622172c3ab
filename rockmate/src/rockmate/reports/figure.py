"""Memory over the step as a figure of matplotlib, for notebooks and papers."""

from __future__ import annotations

from typing import Any

from rockmate.errors import MissingExtraError
from rockmate.problems.problem import Problem
from rockmate.reports.modules import columns
from rockmate.schedules.plan import Plan

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
