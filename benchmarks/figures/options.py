"""What more options of a block gain and cost: the picture of `options.csv`."""

from __future__ import annotations

import itertools
from typing import Any

import matplotlib as mpl
import matplotlib.ticker
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from figures.style import TITLES, in_order, label_ends, number
from harness.points import Row


def draw_options(rows: list[Row]) -> Figure:
    """What a finer grid of options gains, and what it costs."""
    rows = [row for row in rows if row["solve_seconds"]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 3.6), layout="constrained")
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row["network"], row["budget"]), []).append(row)

    def boxes(row: Row) -> int:
        peaks, saves = row["strategy"].split("x")
        return int(peaks) * int(saves)

    colors = ["#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#CC79A7"]
    ends: tuple[list[Any], list[Any]] = ([], [])
    names = in_order((key[0] for key in lines), TITLES)
    ordered = sorted(lines, key=lambda key: (names.index(key[0]), key[1]))
    for color, key in zip(itertools.cycle(colors), ordered, strict=False):
        own = sorted(lines[key], key=boxes)
        label = f"{TITLES.get(key[0], key[0])}\nin {key[1]} of its memory"
        for axes, column, place in (
            (left, "planned_overhead_percent", ends[0]),
            (right, "solve_seconds", ends[1]),
        ):
            points = [(boxes(r), number(r, column)) for r in own if r[column]]
            if points:
                axes.plot(*zip(*points, strict=True), color=color, marker="o", ms=4.5)
                place.append((*points[-1], label, color))
    grids = sorted({boxes(row): row["strategy"] for row in rows}.items())
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks([g[0] for g in grids], [g[1].replace("x", "×") for g in grids], rotation=35)
        axes.minorticks_off()
        axes.set_xlabel("peak × saved budgets for each class of blocks")
    left.set_ylabel("extra time planned, %")
    left.set_ylim(0, 1.12 * left.get_ylim()[1])
    right.set_ylabel("seconds of solving")
    right.set_yscale("log")
    right.yaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5)))
    right.yaxis.set_major_formatter("{x:g}")
    right.yaxis.set_minor_formatter(mpl.ticker.NullFormatter())
    figure.canvas.draw()
    label_ends(left, ends[0], 0.13)
    label_ends(right, ends[1], 0.13)
    return figure
