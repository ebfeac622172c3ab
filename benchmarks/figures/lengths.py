"""Every step of batches of many sizes, beside the same one of plain PyTorch: of `lengths.csv`."""

from __future__ import annotations

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.style import STYLES, TITLES, number
from harness.points import Row

FIRST = "#D55E00"
ALLOWED = 3.0  # steps of plain PyTorch that the first one of a new size may take


def draw_lengths(rows: list[Row]) -> Figure:
    """Draw a panel for each network: how long each step took, in steps of plain PyTorch."""
    networks = list(dict.fromkeys(row["network"] for row in rows))
    figure, panels = plt.subplots(
        1, len(networks), figsize=(9.2, 3.6), layout="constrained", squeeze=False, sharey=True
    )
    for axes, network in zip(panels[0], networks, strict=True):
        _panel(axes, [row for row in rows if row["network"] == network and row["plain_s"]])
        axes.set_title(TITLES.get(network, network), fontsize=9)
        axes.set_xlabel("step")
    panels[0][0].set_ylabel("CPU time, plain PyTorch = 1")
    handles = [
        plt.Line2D([], [], color=FIRST, marker="^", ls="", label="the first step of a size"),
        plt.Line2D([], [], color=STYLES["rockmate"][0], marker=".", ls="", label="all others"),
        plt.Line2D([], [], color="0.5", ls="--", label="what the first may take"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8.5)
    return figure


def _panel(axes: Axes, rows: list[Row]) -> None:
    for is_first, color, marker in ((False, STYLES["rockmate"][0], "."), (True, FIRST, "^")):
        own = [row for row in rows if bool(row["peak_bytes"]) == is_first]
        axes.plot(
            [number(row, "step") for row in own],
            [number(row, "planned_s") / number(row, "plain_s") for row in own],
            ls="",
            color=color,
            marker=marker,
            ms=4,
        )
    axes.axhline(ALLOWED, color="0.5", ls="--", lw=0.8)
    axes.axhline(1, color="0.8", lw=0.8)
    axes.set_yscale("log")
    axes.set_yticks([0.5, 1, 2, 3, 5, 10, 20], ["0.5", "1", "2", "3", "5", "10", "20"])
    axes.minorticks_off()
