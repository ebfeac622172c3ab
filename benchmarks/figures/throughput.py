"""Batches that fit into fixed memory, and their speed: the picture of `throughput.csv`."""

from __future__ import annotations

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from figures.style import (
    MIB,
    STYLES,
    TITLES,
    family,
    handles_of,
    in_order,
    number,
    ok,
    row_of_panels,
)
from harness.points import Row


def draw_throughput(rows: list[Row]) -> Figure:
    """Samples per second against the batch, within the memory of plain PyTorch at the smallest."""
    networks = in_order((row["network"] for row in rows), TITLES)
    figure, panels = row_of_panels(networks, 4.3, 3.7)
    for axes, network in zip(panels, networks, strict=True):
        own = [row for row in rows if row["network"] == network]
        for name in in_order(map(family, own), STYLES):
            color, marker, _ = STYLES[name]
            fits = sorted(
                (int(row["batch"]), number(row, "throughput_ratio"))
                for row in ok(own)
                if family(row) == name
            )
            if not fits:
                continue
            axes.plot(*zip(*fits, strict=True), color=color, marker=marker, ms=5.5, lw=1.5)
            refused = [
                int(row["batch"])
                for row in own
                if family(row) == name and row["status"] in ("over budget", "infeasible")
            ]
            if refused and min(refused) > fits[-1][0]:
                axes.plot(
                    [fits[-1][0], min(refused)], [fits[-1][1]] * 2, color=color, ls=":", lw=1.2
                )
                axes.plot(min(refused), fits[-1][1], color=color, marker="x", ms=7, mew=1.8)
        axes.axhline(1, color="0.8", lw=0.8, zorder=0)
        axes.set_ylim(bottom=0)
        axes.set_xscale("log")
        batches = sorted({int(row["batch"]) for row in own})
        axes.set_xticks(batches, [str(b) for b in batches])
        axes.minorticks_off()
        memory = max((number(row, "budget_bytes") for row in own), default=0) / MIB
        axes.set_title(f"{TITLES.get(network, network)} in {memory:.0f} MiB", fontsize=10)
        axes.set_xlabel("batch size")
    panels[0].set_ylabel("samples per second,\nrelative to plain at the smallest batch")
    handles = handles_of(map(family, rows))
    handles.append(plt.Line2D([], [], color="0.3", marker="x", ls=":", label="does not fit"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8.5)
    return figure
