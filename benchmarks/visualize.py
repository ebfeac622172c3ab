"""Draw every figure from the rows in `results/`, and from nothing else.

    $ python benchmarks/visualize.py                  # results/*.csv -> results/figures/*.png
    $ python benchmarks/visualize.py --results DIR --out DIR

One picture per experiment, device and size; what was measured nowhere is not drawn. Needs
matplotlib (`pip install 'rockmate[plot]'`).
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.ticker

mpl.use("agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiment import RESULTS, Row, read_rows
from step_figure import draw_step

MIB = 2**20
# Colours that people with any colour vision tell apart (Okabe and Ito), one for each strategy.
STYLES = {
    "plain": ("#555555", "X", "plain PyTorch"),
    "rockmate": ("#0072B2", "o", "Rockmate"),
    "rotor": ("#E69F00", "s", "rotor"),
    "checkpoint": ("#009E73", "^", "torch.utils.checkpoint"),
    "selective": ("#CC79A7", "v", "selective checkpointing"),
    "compile": ("#D55E00", "D", "torch.compile with a budget (inductor)"),
    "compile-aot": ("#7A4B00", "P", "torch.compile with a budget (aot_eager)"),
    "checkmate": ("#D55E00", "D", "Checkmate: one ILP over the graph"),
}
TITLES = {
    "gpt2-small": "GPT-2, 12 layers",
    "gpt2-medium": "GPT-2, 24 layers",
    "gpt2-large": "GPT-2, 36 layers",
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "resnet152": "ResNet-152",
    "regnet-x-3.2": "RegNet-X 3.2",
    "regnet-y-1.6": "RegNet-Y 1.6",
    "mlp-mixer": "MLP-Mixer",
    "transformer": "nn.Transformer",
    "unet": "U-Net",
    "fno": "FNO",
}
plt.rcParams.update(
    {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
)


def family(row: Mapping[str, str]) -> str:
    """Return the strategy without its setting."""
    return row["strategy"].split()[0]


def number(row: Mapping[str, str], column: str) -> float:
    """Return a figure of a row, NaN where it has none."""
    return float(row.get(column) or "nan")


def ok(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of points that were measured to the end."""
    return [row for row in rows if row["status"] == "ok"]


def in_order(values: Iterable[str], order: Iterable[str]) -> list[str]:
    """Return the distinct values in a given order, unknown ones last."""
    rank = {value: i for i, value in enumerate(order)}
    return sorted(dict.fromkeys(values), key=lambda v: (rank.get(v, len(rank)), v))


def stamp(figure: Figure, rows: Sequence[Row]) -> None:
    """Write above the panels where the rows were measured."""

    def values(column: str) -> str:
        return ", ".join(dict.fromkeys(row[column] for row in rows))

    text = f"{values('device')}, {values('threads')} threads, torch {values('torch')}, "
    # At the top: legends take the room below the panels, whatever the layout leaves free there.
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.set(rect=(0, 0, 1, 1 - 0.22 / figure.get_figheight()))
    figure.text(
        *(0.995, 1 - 0.04 / figure.get_figheight()),
        f"{text}commit {values('commit')}",
        ha="right",
        va="top",
        fontsize=6.5,
        color="0.45",
    )


def legend_below(figure: Figure, families: Iterable[str], columns: int = 3) -> None:
    """Put one legend under all panels, where no line can run."""
    handles = [
        plt.Line2D([], [], color=STYLES[f][0], marker=STYLES[f][1], label=STYLES[f][2])
        for f in in_order(families, STYLES)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8.5)


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]], gap: float) -> None:
    """Write each line's name beside its end (x, y, text, colour), moved apart where they meet.

    `gap` is the least distance in axes heights. The room on the right must be there.
    """
    to_axes = axes.transAxes.inverted()
    places = []
    for x, y, text, color in ends:
        _, height = to_axes.transform(axes.transData.transform((x, y)))
        places.append([height, x, y, text, color])
    places.sort(key=lambda place: place[0])
    for lower, upper in itertools.pairwise(places):
        upper[0] = max(upper[0], lower[0] + gap)
    over = places[-1][0] - 1.0 if places else 0.0
    if over > 0:
        places[-1][0] -= over
        for upper, lower in itertools.pairwise(reversed(places)):
            lower[0] = min(lower[0], upper[0] - gap)
    for height, x, y, text, color in places:
        axes.annotate(
            text,
            xy=(x, y),
            xytext=(1.02, height),
            textcoords="axes fraction",
            va="center",
            color=color,
            fontsize=8.5,
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "lw": 0.6,
                "alpha": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 1,
            },
        )


# ------------------------------------------------------------------ the figures


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
        axes.set_xlim(0, 118)
        axes.tick_params(labelbottom=True)
    for axes in panels.flat[max(0, len(networks) - columns) : len(networks)]:
        axes.set_xlabel("peak, % of plain")
    for axes in panels[:, 0]:
        axes.set_ylabel("extra time, %")
    legend_below(figure, map(family, rows))
    return figure


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
    names = list(map(family, rows))
    handles = [
        plt.Line2D([], [], color=STYLES[f][0], marker=STYLES[f][1], label=STYLES[f][2])
        for f in in_order(names, STYLES)
    ]
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


def row_of_panels(names: Sequence[str], width: float, height: float) -> tuple[Figure, list[Any]]:
    """Return a figure with one panel for each name, side by side; sizes in inches."""
    size = (width * len(names) + 0.4, height)
    figure, panels = plt.subplots(1, len(names), figsize=size, squeeze=False, layout="constrained")
    return figure, list(panels[0])


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
    handles = [
        plt.Line2D([], [], color=STYLES[f][0], label=STYLES[f][2])
        for f in in_order(map(family, rows), STYLES)
    ]
    handles.append(plt.Line2D([], [], color="k", ls="--", label="Rockmate's budget"))
    columns = 4 if len(networks) > 1 else 2
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=9)
    return figure


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
    handles = [
        plt.Line2D([], [], color=STYLES[f][0], marker=STYLES[f][1], label=STYLES[f][2])
        for f in in_order(map(family, rows), STYLES)
    ]
    handles.append(plt.Line2D([], [], color="0.3", marker="x", ls=":", label="does not fit"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8.5)
    return figure


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


FIGURES: dict[str, tuple[str, Callable[[list[Row]], Figure]]] = {
    "overhead": ("performance", draw_overhead),
    "planning": ("planning", draw_planning),
    "timeline": ("timeline", draw_timeline),
    "throughput": ("throughput", draw_throughput),
    "options": ("options", draw_options),
    "peers": ("peers", draw_peers),
    "step": ("step", draw_step),
}


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows by where and at which size they were measured, under a suffix for files.

    Rows of the smallest sizes are drawn only where there are no others.
    """
    if any(row["size"] != "smoke" for row in rows):
        rows = [row for row in rows if row["size"] != "smoke"]
    found: dict[str, list[Row]] = {}
    for row in rows:
        device = "" if row["device"].startswith("cpu") else re.sub(r"\W+", "-", row["device"])
        size = "" if row["size"] == "cpu" else row["size"]
        found.setdefault("-".join(part.strip("-") for part in (device, size) if part), []).append(
            row
        )
    return found


def draw_all(results: Path, out: Path, only: Iterable[str] = FIGURES) -> list[Path]:
    """Draw the figures that there are rows for; return the files written."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name in only:
        table, draw = FIGURES[name]
        for suffix, rows in groups(read_rows(results / f"{table}.csv")).items():
            if not ok(rows):
                continue
            figure = draw(rows)
            stamp(figure, rows)
            path = out / f"{name}{'-' if suffix else ''}{suffix}.png"
            figure.savefig(path, dpi=130)
            plt.close(figure)
            written.append(path)
    return written


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Return pairs of texts of a figure that cover each other."""
    figure.canvas.draw()
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not axes.get_visible() or not low <= tick.get_loc() <= high:
                    hidden |= {tick.label1, tick.label2}  # made, and not drawn
    texts = [
        text
        for text in figure.findobj(mpl.text.Text)
        if text.get_visible() and text.get_text().strip() and text not in hidden
    ]
    # of the text alone: an annotation counts its arrow, too
    boxes = [
        (text.get_text(), mpl.text.Text.get_window_extent(text).shrunk(0.94, 0.94))
        for text in texts
    ]
    return [
        (one, other)
        for (one, a), (other, b) in itertools.combinations(boxes, 2)
        if a.overlaps(b) and a.width and b.width
    ]


def main() -> int:
    """Draw, and say what was drawn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, help="default: figures/ in the results")
    flags = parser.parse_args()
    written = draw_all(flags.results, flags.out or flags.results / "figures")
    for path in written:
        print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")
    if not written:
        print(f"no rows in {flags.results}: run the experiments first", file=sys.stderr)
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main())
