"""Colours, labels of vertices, and the legend of a picture."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from rkgb.pictures.sketch import Sketch

FORWARD, BACKWARD = (31, 119, 180), (214, 96, 31)  # blue and orange, for the colour-blind too
PHANTOM, GREY = "#8a6fb0", "#606060"
# Light fills for classes of blocks, distinct also for people who confuse red and green.
_CLASSES = (
    *("#8ecae6", "#ffd166", "#b5e2b5", "#f4a6a0", "#cdb4db", "#d9c4a5", "#9fd8cb", "#f7b7d5"),
    *("#c9c9c9", "#e4e27a", "#a9c1f5", "#f6c89f", "#7fb7b2", "#e08fb0", "#b7a6e8", "#c2d36b"),
    *("#f0a35e", "#86c6f2", "#d6a4d9", "#a3b899"),
)


def tone(colour: tuple[int, int, int], share: float) -> str:
    """Return the colour at `share` of its full tone; above 1 darker, for borders."""
    if share > 1:
        return "#" + "".join(f"{round(c * 0.8):02x}" for c in colour)
    strength = 0.08 + 0.5 * share
    return "#" + "".join(f"{round(255 - (255 - c) * strength):02x}" for c in colour)


def class_colour(number: int, strength: float = 1.0) -> str:
    """Return the fill of a class of blocks, paler for less strength."""
    colour = _CLASSES[number % len(_CLASSES)]
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * strength):02x}" for part in parts)


def label_of(title: str, details: Sequence[str], path: str = "", colour: str = "#000000") -> str:
    """Return a label of rows: the bold title with the module's name, and small details."""
    first = f"<B>{html.escape(title)}</B>" if title else ""
    if path:
        first += f'&nbsp;&nbsp;<FONT COLOR="#404040"><I>{html.escape(path)}</I></FONT>'
    rows = [first] if first else []
    rows += [f'<FONT POINT-SIZE="9">{html.escape(d)}</FONT>' for d in details if d]
    cells = "".join(f"<TR><TD>{row}</TD></TR>" for row in rows)
    table = f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="1">{cells}</TABLE>'
    return f'<<FONT COLOR="{colour}">{table}</FONT>>'


def legend(sketch: Sketch, folded: bool) -> str:
    """Return the title and a table of exactly the signs that the picture uses."""
    everything = (sketch, *sketch.parts)
    vertices = [v for part in everything for cell in part.cells for v in cell.vertices.values()]
    kinds = {vertex.kind for vertex in vertices}
    styles = {arrow.style for part in everything for arrow in part.arrows}
    rows: list[tuple[str, str]] = []
    for kind, colour, what in (("fwd", FORWARD, "forward"), ("bwd", BACKWARD, "backward")):
        if kind in kinds:
            swatch = "".join(_swatch(tone(colour, share)) for share in (0.1, 0.5, 1.0))
            rows.append((swatch, f"{what}; darker: more {html.escape(sketch.shade)}"))
    if "bwd" in kinds:
        rows.append((_text("+ MiB", "#000000"), "temporary memory, above what is read and made"))
    rows += _legend_of_data(kinds, sketch.size)
    if "block" in kinds:
        seen = sorted({v.colour_class or 0 for v in vertices if v.kind == "block"})
        swatches = "".join(_swatch(class_colour(number)) for number in seen[:8])
        rows.append((swatches, "block; one colour: equal blocks, solved once"))
    for style, sign, meaning in (
        ("value", "<B>→</B>", "a value is read"),
        ("gradient", "<B>→</B>", "a gradient is added or read"),
        ("saved", "- - →", "kept from forward to backward"),
        ("order", "· · →", "must come first (memory overwritten, random numbers)"),
    ):
        if style in styles:
            colour_of = tone(BACKWARD, 2.0) if style == "gradient" else GREY
            rows.append((_text(sign, colour_of), meaning))
    if folded:
        rows.append((_text("<B>n ×</B>", "#202020"), "equal neighbours, drawn once"))
    return _table(sketch.title, rows)


def _legend_of_data(kinds: Iterable[str], size: str) -> list[tuple[str, str]]:
    rows = []
    for kind, colour, what in (
        ("data", tone(FORWARD, 2.0), f"value; larger: more {size}"),
        ("grad", tone(BACKWARD, 2.0), "gradient of a value"),
        ("phantom", PHANTOM, "phantom: kept by autograd for the backward alone"),
    ):
        if kind in kinds:
            sign = "⬡" if kind == "phantom" else "◯"
            rows.append((_text(sign, colour), what))
    return rows


def _swatch(colour: str) -> str:
    return f'<FONT COLOR="{colour}">■</FONT>'


def _text(text: str, colour: str) -> str:
    return f'<FONT COLOR="{colour}">{text}</FONT>'


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = [f'<TR><TD COLSPAN="2" ALIGN="LEFT"><B>{html.escape(title)}</B></TD></TR>']
    for sign, text in rows:
        lines.append(f'<TR><TD ALIGN="LEFT">{sign}</TD><TD ALIGN="LEFT">{text}</TD></TR>')
    body = "".join(lines)
    return f'<<FONT POINT-SIZE="11"><TABLE BORDER="0" CELLSPACING="2">{body}</TABLE></FONT>>'
