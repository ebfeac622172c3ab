"""The picture of `step.csv`: a bar for each figure and checkout, with the aim beside it."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.points import Row
from steps.table import step_value

# Okabe and Ito: this checkout, and the one that it is measured against
COLORS = {"this": "#0072B2", "against": "#E69F00"}
AIM = "#D55E00"
PANELS = {
    "step": "a step that recomputes nothing, over plain PyTorch",
    "recomputed": "every block recomputed, over plain PyTorch",
    "capture": "seconds of a capture",
    "planned": "extra time of a step, measured less planned, in points",
}
NAMES = {
    "checkpoint": "torch.utils.\ncheckpoint",
    "rockmate": "Rockmate,\nequal peak",
    "rockmate recompute_all": "Rockmate,\nrecompute_all",
}


def draw_step(rows: list[Row]) -> Figure:
    """Draw a panel for each kind of subject; what has no figure is named where its bar would be."""
    kinds = [kind for kind in PANELS if any(row["kind"] == kind for row in rows)]
    widths = [max(2, len(labels(rows, kind))) for kind in kinds]
    lines = [kinds[:2], kinds[2:]] if len(kinds) > 2 else [kinds]
    figure = plt.figure(figsize=(9.6, 0.6 + 3.1 * len(lines)), layout="constrained")
    parts = figure.subfigures(len(lines), 1, squeeze=False)[:, 0]
    for part, own in zip(parts, lines, strict=True):
        ratios = [widths[kinds.index(kind)] for kind in own]
        panels = part.subplots(1, len(own), width_ratios=ratios, squeeze=False)[0]
        for axes, kind in zip(panels, own, strict=True):
            panel(axes, kind, rows)
    which = list(dict.fromkeys((row["which"], row["commit"]) for row in rows))
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[w], label=f"{w} ({c})") for w, c in which]
    handles.append(plt.Line2D([], [], color=AIM, lw=2, label="aim"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8.5)
    return figure


def labels(rows: Sequence[Row], kind: str) -> list[tuple[str, str]]:
    """Return the bars of a panel, by subject and contender, in order."""
    own = [row for row in rows if row["kind"] == kind]
    return list(dict.fromkeys((row["name"], row["strategy"]) for row in own))


def text_under(kind: str, name: str, strategy: str) -> str:
    """Return the name of a bar."""
    if kind == "recomputed":
        return NAMES.get(strategy, strategy)
    short = name.removeprefix("capture_").removeprefix("planned_")
    if kind == "planned":
        network, _, percent = short.rpartition("_")
        return f"{network}\n{percent} %"
    return short.replace("_", "\n")


def panel(axes: Axes, kind: str, rows: Sequence[Row]) -> None:
    """Draw the bars of one kind."""
    places = labels(rows, kind)
    which = list(dict.fromkeys(row["which"] for row in rows))
    width = 0.8 / len(which)
    for row in (row for row in rows if row["kind"] == kind):
        place = places.index((row["name"], row["strategy"]))
        x = place - 0.4 + width * (which.index(row["which"]) + 0.5)
        if row["target"]:
            aim = float(row["target"])
            axes.hlines(aim, place - 0.46, place + 0.46, color=AIM, lw=2, zorder=3)
        if row["status"] != "ok":
            axes.text(x, 0, f" {row['status']}", rotation=90, ha="center", va="bottom", fontsize=7)
            continue
        value = step_value(row)
        axes.bar(x, value, width, color=COLORS[row["which"]])
        low, high = row["time_ratio_low"], row["time_ratio_high"]
        if kind == "capture":
            low, high = row["capture_seconds_low"], row["capture_seconds_high"]
        if kind != "planned":
            axes.vlines(x, float(low), float(high), color="k", lw=0.9, zorder=4)
    if kind in ("step", "recomputed"):
        axes.axhline(1, color="0.4", lw=0.8, ls="--", zorder=0)
    if kind == "planned":
        axes.axhline(0, color="0.4", lw=0.8)
    axes.set_xticks(range(len(places)), [text_under(kind, *place) for place in places], fontsize=7)
    axes.set_xlim(-0.6, len(places) - 0.4)
    axes.set_title(PANELS[kind], fontsize=9)
