"""Extra time against peak memory: the picture of `performance.csv`."""

from __future__ import annotations

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from figures.style import STYLES, TITLES, family, in_order, legend_below, number, ok
from harness.points import Row

_WIDEST_PERCENT = 160  # of plain PyTorch's peak; what takes more is not drawn
_HIGHEST_PERCENT = 200  # of extra time; a line to the smallest budget may leave at the top


def draw_overhead(rows: list[Row]) -> Figure:
    """Extra time against peak memory, a panel for each network, a line for each strategy."""
    rows = ok(rows)
    networks = in_order((row["network"] for row in rows), TITLES)
    columns = min(4, len(networks))
    lines = -(-len(networks) // columns)
    figure, panels = plt.subplots(
        lines,
        columns,
        figsize=(2.75 * columns + 0.4, 2.25 * lines + 1.1),
        squeeze=False,
        layout="constrained",
        sharex=True,
    )
    for axes in panels.flat[len(networks) :]:
        axes.set_visible(False)
    peaks = (100 * number(row, "peak_bytes") / number(row, "plain_peak_bytes") for row in rows)
    drawn = [peak for peak in peaks if peak <= _WIDEST_PERCENT]
    for axes, network in zip(panels.flat, networks, strict=False):
        own = [row for row in rows if row["network"] == network]
        for name in in_order(map(family, own), STYLES):
            color, marker, _ = STYLES[name]
            points = sorted(
                (
                    100 * number(row, "peak_bytes") / number(row, "plain_peak_bytes"),
                    100 * (number(row, "time_ratio") - 1),
                    100 * (number(row, "time_ratio_low") - 1),
                    100 * (number(row, "time_ratio_high") - 1),
                )
                for row in own
                if family(row) == name
            )
            x = [p[0] for p in points]
            axes.vlines(x, [p[2] for p in points], [p[3] for p in points], color=color, lw=0.9)
            axes.plot(x, [p[1] for p in points], color=color, marker=marker, ms=4.5, lw=1.4)
        axes.set_title(TITLES.get(network, network), fontsize=9.5)
        axes.axhline(0, color="0.8", lw=0.8, zorder=0)
        axes.set_xlim(0, max(118, max(drawn, default=0) + 4))
        axes.set_ylim(top=min(axes.get_ylim()[1], _HIGHEST_PERCENT))
        axes.tick_params(labelbottom=True)
    for axes in panels.flat[max(0, len(networks) - columns) : len(networks)]:
        axes.set_xlabel("peak, % of plain")
    for axes in panels[:, 0]:
        axes.set_ylabel("extra time, %")
    legend_below(figure, map(family, rows))
    return figure
