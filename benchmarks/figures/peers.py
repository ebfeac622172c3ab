"""FLOPs against peak, with every peer: the picture of `peers.csv`."""

from __future__ import annotations

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from figures.style import MIB, STYLES, family, in_order, legend_below, number, ok
from harness.points import Row


def draw_peers(rows: list[Row]) -> Figure:
    """FLOPs against peak: every peer in every setting, and Rockmate at the same peaks."""
    rows = ok(rows)
    figure, axes = plt.subplots(figsize=(7.6, 4.6), layout="constrained")
    for name in in_order(map(family, rows), STYLES):
        color, marker, _ = STYLES[name]
        points = sorted(
            (number(row, "peak_bytes") / MIB, 100 * (number(row, "flops_ratio") - 1))
            for row in rows
            if family(row) == name
        )
        ours = name == "rockmate"
        axes.plot(
            *zip(*points, strict=True),
            color=color,
            marker=marker,
            ms=4.5 if ours else 6.5,
            ls="-" if ours else "",
            lw=1.6,
            mew=0.8,
            mec=color if ours else "white",
            zorder=2 if ours else 3,  # a peer that is as good must be seen
        )
    axes.set_xlabel("peak memory of a step, MiB above parameters, gradients and inputs")
    axes.set_ylabel("extra FLOPs of a step, %")
    axes.set_xlim(left=0)
    axes.grid(color="0.93", lw=0.8)
    axes.set_axisbelow(True)
    legend_below(figure, map(family, rows), columns=2)
    return figure
