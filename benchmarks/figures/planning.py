"""Seconds of solving against size: the picture of `planning.csv`."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.style import STYLES, TITLES, family, handles_of, in_order, number
from harness.points import Row


def draw_planning(rows: list[Row]) -> Figure:
    """Seconds of solving against the size of the network, on a logarithmic axis."""
    deep = [row for row in rows if row["network"].startswith("gpt2:")]
    wide = [row for row in rows if not row["network"].startswith("gpt2:")]
    order = in_order((row["network"] for row in wide), TITLES)
    ratios = (3, 2) if wide else (1,)
    figure, panels = plt.subplots(
        *(1, len(ratios)),
        figsize=(9.2, 3.9),
        layout="constrained",
        width_ratios=ratios,
        sharey=True,
        squeeze=False,
    )
    left = panels[0, 0]

    def depth(row: Row) -> float:
        return float(row["network"].partition(":")[2])

    _planning_panel(left, deep, depth)
    left.set_xscale("log")
    left.set_yscale("log")
    depths = sorted({depth(row) for row in deep})
    left.set_xticks(depths, [f"{d:g}" for d in depths])
    left.minorticks_off()
    left.set_xlabel("blocks of the GPT-2")
    left.set_ylabel("seconds of solving")
    for right in panels[0, 1:]:
        _planning_panel(right, wide, lambda row: float(order.index(row["network"])))
        right.set_xticks(range(len(order)), [TITLES.get(n, n) for n in order])
        right.set_xlim(-0.5, len(order) - 0.5)
    for axes in panels[0]:
        axes.grid(axis="y", color="0.92", lw=0.8)
        axes.set_axisbelow(True)
    handles = handles_of(map(family, rows))
    if any(row["status"] == "timeout" for row in rows):
        handles.append(
            plt.Line2D(
                [], [], color="0.3", marker="^", mfc="white", ls="", label="stopped: no plan found"
            )
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8.5)
    return figure


def _planning_panel(axes: Axes, rows: list[Row], place: Callable[[Row], float]) -> None:
    for name in in_order(map(family, rows), STYLES):
        color, marker, _ = STYLES[name]
        own = sorted(
            (place(row), number(row, "solve_seconds"), row) for row in rows if family(row) == name
        )  # type: ignore[type-var]
        done = [(x, y) for x, y, row in own if row["status"] == "ok" and y == y]
        axes.plot(*zip(*done, strict=True), color=color, marker=marker, ms=5) if done else None
        late = [(x, y) for x, y, row in own if row["status"] == "timeout" and y == y]
        if late:
            axes.plot(*zip(*late, strict=True), color=color, marker="^", mfc="white", ls="", ms=7)
