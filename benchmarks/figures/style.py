"""What all figures share: colours, names of networks, legends, and the search for hidden text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.points import Row

MIB = 2**20
# Colours that people with any colour vision tell apart (Okabe and Ito), one for each strategy.
STYLES = {
    "plain": ("#555555", "X", "plain PyTorch"),
    "rockmate": ("#0072B2", "o", "Rockmate"),
    "rockmate-compiled": ("#56B4E9", "o", "Rockmate, compile=True"),
    "rotor": ("#E69F00", "s", "rotor"),
    "checkpoint": ("#009E73", "^", "torch.utils.checkpoint"),
    "selective": ("#CC79A7", "v", "selective checkpointing"),
    "compile": ("#D55E00", "D", "torch.compile with a budget (inductor)"),
    "compile-aot": ("#7A4B00", "P", "torch.compile with a budget (aot_eager)"),
    "checkmate": ("#D55E00", "D", "Checkmate: one ILP over the graph"),
}
TITLES = {
    "gpt": "GPT, 8 layers",
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
    "bert": "BERT, 12 layers",
    "llama": "Llama, 12 layers",
    "fno": "FNO",
}
_LEGEND_COLUMN = 2.8  # inches of the longest entry
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


def handles_of(families: Iterable[str], markers: bool = True) -> list[Any]:
    """Return what a legend shows of some strategies."""
    return [
        plt.Line2D(
            [], [], color=STYLES[f][0], marker=STYLES[f][1] if markers else "", label=STYLES[f][2]
        )
        for f in in_order(families, STYLES)
    ]


def legend_below(figure: Figure, families: Iterable[str], columns: int = 3) -> None:
    """Put one legend under all panels, where no line can run; narrow figures have fewer columns."""
    columns = min(columns, max(1, int(figure.get_figwidth() / _LEGEND_COLUMN)))
    figure.legend(
        handles=handles_of(families), loc="outside lower center", ncols=columns, fontsize=8.5
    )


def row_of_panels(names: Sequence[str], width: float, height: float) -> tuple[Figure, list[Any]]:
    """Return a figure with one panel for each name, side by side; sizes in inches."""
    size = (width * len(names) + 0.4, height)
    figure, panels = plt.subplots(1, len(names), figsize=size, squeeze=False, layout="constrained")
    return figure, list(panels[0])


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
