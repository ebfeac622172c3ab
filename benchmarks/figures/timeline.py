"""Memory over one step: the picture of `timeline.csv`."""

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


def draw_timeline(rows: list[Row]) -> Figure:
    """Memory over one step, a panel for each network."""
    rows = ok(rows)
    networks = in_order((row["network"] for row in rows), TITLES)
    figure, panels = row_of_panels(networks, 3.4, 3.4)
    for axes, network in zip(panels, networks, strict=True):
        own = {family(row): row for row in rows if row["network"] == network}
        for name in in_order(own, ("plain", "checkpoint", "rockmate")):
            color = STYLES[name][0]
            times = [float(t) for t in own[name]["curve_ms"].split()]
            held = [float(h) / 1024 for h in own[name]["curve_kib"].split()]
            axes.step(times, held, where="post", color=color, lw=1.2)
            axes.fill_between(times, held, step="post", color=color, alpha=0.10, lw=0)
        ours = own.get("rockmate")
        if ours is not None and ours["budget_bytes"]:
            axes.axhline(number(ours, "budget_bytes") / MIB, color="k", ls="--", lw=1)
        axes.set_title(TITLES.get(network, network), fontsize=10)
        axes.set_xlabel("time in the step (ms)")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("MiB above parameters,\ngradients and inputs")
    handles = handles_of(map(family, rows), markers=False)
    handles.append(plt.Line2D([], [], color="k", ls="--", label="Rockmate's budget"))
    columns = 4 if len(networks) > 1 else 2
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=9)
    return figure
