"""Put a sketch into the DOT language: boxes, colours, arrows and the legend.

Cells are grouped in boxes by module path; repeated layers are in a box of their own with their
number. In a graph of forward and backward, each backward is on the level of its forward, and the
arrows of gradients run upwards.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rkgb.fold import Folding, fold
from rkgb.sketch import Arrow, Sketch, Vertex

_FONT = "Helvetica"
_FORWARD, _BACKWARD = (31, 119, 180), (214, 96, 31)  # blue and orange: apart for everybody
_PHANTOM, _GREY = "#8a6fb0", "#606060"
# Light fills for classes of blocks, told apart also by people who confuse red and green.
_CLASSES = (
    *("#8ecae6", "#ffd166", "#b5e2b5", "#f4a6a0", "#cdb4db", "#d9c4a5", "#9fd8cb", "#f7b7d5"),
    *("#c9c9c9", "#e4e27a", "#a9c1f5", "#f6c89f", "#7fb7b2", "#e08fb0", "#b7a6e8", "#c2d36b"),
    *("#f0a35e", "#86c6f2", "#d6a4d9", "#a3b899"),
)


@dataclass
class _Modules:
    """Cells that follow each other inside one module.

    A module that is left and entered again is another box: a box never joins what lies far apart.
    """

    path: str = ""
    cells: list[int] = field(default_factory=list)
    inner: list[_Modules] = field(default_factory=list)

    def size(self) -> int:
        return len(self.cells) + sum(module.size() for module in self.inner)

    def all_cells(self) -> Iterator[int]:
        yield from self.cells
        for module in self.inner:
            yield from module.all_cells()


def draw(sketch: Sketch) -> Any:
    """Return a `graphviz.Digraph` of the sketch, with its legend below."""
    import graphviz

    graph = graphviz.Digraph(
        graph_attr={
            **{"fontname": _FONT, "labelloc": "b", "labeljust": "l", "nodesep": "0.25"},
            **{"ranksep": "0.3", "dpi": "110", "pad": "0.2"},
        },
        node_attr={"fontname": _FONT, "fontsize": "11", "height": "0.3", "margin": "0.09,0.05"},
        edge_attr={"fontname": _FONT, "fontsize": "9", "arrowsize": "0.6", "color": _GREY},
    )
    drawers = [_Drawer(part, f"p{i}_") for i, part in enumerate((sketch, *sketch.parts))]
    heaviest = {
        compute: max(drawer.heaviest(compute) for drawer in drawers) for compute in (True, False)
    }
    for number, drawer in enumerate(drawers):
        part, prefix = drawer.sketch, drawer.prefix
        if not sketch.parts:
            drawer.draw(graph, heaviest)
            continue
        fill = "#ffffff" if part.colour_class is None else _class_colour(part.colour_class, 0.45)
        with graph.subgraph(name=f"cluster_{prefix}") as box:
            box.attr(
                label="chain of blocks" if number == 0 else part.title,
                **{"style": "rounded,filled", "fillcolor": fill, "color": _GREY},
                **{"fontname": f"{_FONT}-Bold", "fontsize": "13", "labelloc": "t", "margin": "12"},
            )
            drawer.draw(box, heaviest)
    graph.attr(label=_legend(sketch, any(drawer.folding.repeats for drawer in drawers)))
    return graph


class _Drawer:
    """Draws one sketch into a graph or a cluster."""

    def __init__(self, sketch: Sketch, prefix: str) -> None:
        self.sketch = sketch
        self.prefix = prefix
        cells = sketch.cells
        self.folding: Folding = fold([c.path for c in cells], [c.signature for c in cells])
        self.two_sided = any("bwd" in cell.vertices for cell in cells)

    def heaviest(self, compute: bool) -> float:
        """Return the largest weight of the computations, or of the data."""
        cells = (self.sketch.cells[i] for i in self.folding.shown)
        weights = (
            v.weight for cell in cells for v in cell.vertices.values() if _is_compute(v) == compute
        )
        return max(weights, default=0.0)

    def draw(self, graph: Any, heaviest: Mapping[bool, float]) -> None:
        self.scale = heaviest
        self._draw_items(graph, list(self.folding.shown), 0)
        drawn: set[tuple[str, str, str]] = set()
        for arrow in self.sketch.arrows:
            ends = self.folding.edge(arrow.source[0], arrow.target[0])
            if ends is not None:
                self._draw_arrow(graph, arrow, ends, drawn)

    def _draw_items(self, graph: Any, cells: list[int], depth: int) -> None:
        """Draw cells; those of one repeat at nesting level `depth` go into one box."""
        free: list[int] = []
        groups: dict[int, list[int]] = {}
        for cell in cells:
            copies = self.folding.places[cell].copies
            if len(copies) > depth:
                groups.setdefault(copies[depth][0], []).append(cell)
            else:
                free.append(cell)
        self._draw_modules(graph, free)
        for number, members in groups.items():
            with graph.subgraph(name=f"cluster_{self.prefix}r{number}") as box:
                box.attr(
                    label="",
                    **{"style": "rounded,bold", "color": "#202020", "penwidth": "2.2"},
                    **{"margin": "12", "peripheries": "1"},
                )
                self._draw_badge(box, number, members[0])
                self._draw_items(box, members, depth + 1)

    def _draw_badge(self, box: Any, number: int, first: int) -> None:
        # A vertex and not the label of the box: arrows keep clear of vertices, not of labels.
        repeat = self.folding.repeats[number]
        members = [
            index
            for index, place in enumerate(self.folding.places)
            if any(which == number for which, _ in place.copies)
        ]
        title = self.sketch.cells[members[0]].vertices["fwd"].title
        last = self.sketch.cells[members[-1]].vertices["fwd"].title
        label = _label(f"{repeat.count} ×", [repeat.label or f"{title} … {last}"], "", "#ffffff")
        name = f"{self.prefix}badge{number}"
        box.node(name, label=label, shape="box", style="filled", fillcolor="#202020")
        box.edge(name, self._id(first, "fwd"), style="invis")

    def _draw_modules(self, graph: Any, cells: list[int]) -> None:
        root = _Modules()
        trail = [root]  # the modules that the cell before is in, outermost first
        before = -1
        for cell in cells:
            parts = [part for part in self.sketch.cells[cell].path.split(".") if part]
            kept = 0
            if cell == before + 1:
                names = [module.path.rpartition(".")[2] for module in trail[1:]]
                same = (i for i, (a, b) in enumerate(zip(names, parts, strict=False)) if a != b)
                kept = next(same, min(len(names), len(parts)))
            del trail[kept + 1 :]
            for place in range(kept, len(parts)):
                trail[-1].inner.append(_Modules(".".join(parts[: place + 1])))
                trail.append(trail[-1].inner[-1])
            trail[-1].cells.append(cell)
            before = cell
        self._draw_module(graph, root, "")

    def _draw_module(self, graph: Any, module: _Modules, shown_path: str) -> None:
        for cell in module.cells:
            self._draw_cell(graph, cell, shown_path)
        for inner in module.inner:
            while len(inner.inner) == 1 and not inner.cells:
                inner = inner.inner[0]
            first = next(inner.all_cells())
            if inner.size() == 1:  # a box around one box says nothing: name the module inside it
                self._draw_cell(graph, first, shown_path)
                continue
            with graph.subgraph(name=f"cluster_{self.prefix}{first}_{inner.path}") as box:
                label = inner.path[len(shown_path) :].lstrip(".") if shown_path else inner.path
                box.attr(
                    label=label,
                    **{"style": "rounded,filled", "fillcolor": "#00000008", "color": "#b0b0b0"},
                    **{"fontname": f"{_FONT}-Oblique", "fontsize": "11", "margin": "8"},
                    **{"labelloc": "t", "labeljust": "l", "penwidth": "1", "peripheries": "1"},
                )
                self._draw_module(box, inner, inner.path)

    def _draw_cell(self, graph: Any, number: int, shown_path: str) -> None:
        cell = self.sketch.cells[number]
        own = cell.path[len(shown_path) :].lstrip(".") if shown_path else cell.path
        for role, vertex in cell.vertices.items():
            graph.node(self._id(number, role), **self._style(vertex, own if role == "fwd" else ""))
        if self.two_sided:
            level = [r for r in ("fwd", "phantom 0", "bwd") if r in cell.vertices]
            with graph.subgraph() as row:
                row.attr(rank="same")
                for role in level:
                    row.node(self._id(number, role))
                if level == ["fwd", "bwd"]:  # forward on the left, also without a phantom between
                    row.edge(self._id(number, "fwd"), self._id(number, "bwd"), style="invis")

    def _id(self, cell: int, role: str) -> str:
        return f"{self.prefix}{cell}_{role.replace(' ', '_')}"

    def _style(self, vertex: Vertex, own_path: str) -> dict[str, str]:
        share = vertex.weight / (self.scale[_is_compute(vertex)] or 1.0)
        path = own_path if _is_compute(vertex) else ""
        style = {"label": _label(vertex.title, vertex.detail.split("\n"), path)}
        if vertex.kind in ("fwd", "bwd"):
            base = _FORWARD if vertex.kind == "fwd" else _BACKWARD
            style |= {"shape": "box", "style": "rounded,filled", "fillcolor": _mix(base, share)}
            style |= {"color": _mix(base, 2.0), "penwidth": "1.2"}
        elif vertex.kind == "block":
            fill = _class_colour(vertex.colour_class or 0)
            style |= {"shape": "box", "style": "rounded,filled", "fillcolor": fill, "color": _GREY}
        elif vertex.kind in ("input", "output"):
            style |= {"shape": "box", "style": "filled", "fillcolor": "#f2f2f2", "color": _GREY}
        else:
            width = 0.45 + 1.1 * share**0.5
            shapes = {"data": "ellipse", "grad": "ellipse", "phantom": "hexagon"}
            border = {"data": _mix(_FORWARD, 2.0), "grad": _mix(_BACKWARD, 2.0)}
            style |= {"shape": shapes[vertex.kind], "style": "filled", "fillcolor": "#ffffff"}
            style |= {"color": border.get(vertex.kind, _PHANTOM), "width": f"{width:.2f}"}
            style |= {"height": f"{0.25 + 0.35 * share**0.5:.2f}", "margin": "0.02"}
            if vertex.kind == "phantom":
                style |= {"style": "filled,dashed", "fillcolor": "#f1ecf7"}
        return style

    def _draw_arrow(
        self,
        graph: Any,
        arrow: Arrow,
        ends: tuple[int, int],
        drawn: set[tuple[str, str, str]],
    ) -> None:
        source, target = self._id(ends[0], arrow.source[1]), self._id(ends[1], arrow.target[1])
        if source == target or (source, target, arrow.style) in drawn:
            return
        if arrow.style == "order" and (source, target, "value") in drawn:
            return
        drawn.add((source, target, arrow.style))
        if arrow.style == "gradient":
            # The backward runs upwards beside the forward: its arrows point against the ranks.
            graph.edge(target, source, dir="back", color=_mix(_BACKWARD, 2.0))
        elif arrow.style == "saved":
            # On one level (phantoms) the arrow also says what is left and what is right.
            level = str(arrow.source[1].startswith("phantom")).lower()
            graph.edge(source, target, color="#a0a0a0", style="dashed", constraint=level)
        elif arrow.style == "order":
            graph.edge(source, target, style="dotted")
        else:
            graph.edge(source, target)
            self._keep_above(graph, source, *ends)

    def _keep_above(self, graph: Any, source: str, start: int, end: int) -> None:
        """Draw what a repeat reads above its badge, and so above its box."""
        around = self.folding.places[start].copies
        for depth, (number, _) in enumerate(self.folding.places[end].copies):
            if depth >= len(around) or around[depth][0] != number:
                graph.edge(source, f"{self.prefix}badge{number}", style="invis")


def _is_compute(vertex: Vertex) -> bool:
    return vertex.kind in ("fwd", "bwd")


def _mix(colour: tuple[int, int, int], share: float) -> str:
    """Return the colour at `share` of its full tone; from 1 on darker, for borders."""
    if share > 1:
        return "#" + "".join(f"{round(c * 0.8):02x}" for c in colour)
    strength = 0.08 + 0.5 * share
    return "#" + "".join(f"{round(255 - (255 - c) * strength):02x}" for c in colour)


def _class_colour(number: int, strength: float = 1.0) -> str:
    colour = _CLASSES[number % len(_CLASSES)]
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * strength):02x}" for part in parts)


def _label(title: str, details: Sequence[str], path: str = "", colour: str = "#000000") -> str:
    """Return a label of rows: the bold title with the module's name, and small details."""
    first = f"<B>{html.escape(title)}</B>" if title else ""
    if path:
        first += f'&nbsp;&nbsp;<FONT COLOR="#404040"><I>{html.escape(path)}</I></FONT>'
    rows = [first] if first else []
    rows += [f'<FONT POINT-SIZE="9">{html.escape(d)}</FONT>' for d in details if d]
    cells = "".join(f"<TR><TD>{row}</TD></TR>" for row in rows)
    table = f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="1">{cells}</TABLE>'
    return f'<<FONT COLOR="{colour}">{table}</FONT>>'


def _legend(sketch: Sketch, folded: bool) -> str:
    everything = (sketch, *sketch.parts)
    vertices = [v for part in everything for cell in part.cells for v in cell.vertices.values()]
    kinds = {vertex.kind for vertex in vertices}
    styles = {arrow.style for part in everything for arrow in part.arrows}
    rows: list[tuple[str, str]] = []
    for kind, colour, what in (("fwd", _FORWARD, "forward"), ("bwd", _BACKWARD, "backward")):
        if kind in kinds:
            swatch = "".join(_swatch(_mix(colour, share)) for share in (0.1, 0.5, 1.0))
            rows.append((swatch, f"{what}; darker: more {html.escape(sketch.shade)}"))
    if "bwd" in kinds:
        rows.append((_text("+ MiB", "#000000"), "temporary memory, above what is read and made"))
    rows += _legend_of_data(kinds, sketch.size)
    if "block" in kinds:
        seen = sorted({v.colour_class or 0 for v in vertices if v.kind == "block"})
        swatches = "".join(_swatch(_class_colour(number)) for number in seen[:8])
        rows.append((swatches, "block; one colour: equal blocks, solved once"))
    words: Mapping[str, str] = {
        "value": "<B>→</B>",
        "gradient": "<B>→</B>",
        "saved": "- - →",
        "order": "· · →",
    }
    meaning = {
        "value": "a value is read",
        "gradient": "a gradient is added or read",
        "saved": "kept from forward to backward",
        "order": "must come first (memory overwritten, random numbers)",
    }
    for style in ("value", "gradient", "saved", "order"):
        if style in styles:
            tone = _mix(_BACKWARD, 2.0) if style == "gradient" else _GREY
            rows.append((_text(words[style], tone), meaning[style]))
    if folded:
        rows.append((_text("<B>n ×</B>", "#202020"), "equal neighbours, drawn once"))
    return _table(sketch.title, rows)


def _legend_of_data(kinds: Iterable[str], size: str) -> list[tuple[str, str]]:
    rows = []
    for kind, colour, what in (
        ("data", _mix(_FORWARD, 2.0), f"value; larger: more {size}"),
        ("grad", _mix(_BACKWARD, 2.0), "gradient of a value"),
        ("phantom", _PHANTOM, "phantom: kept by autograd for the backward alone"),
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
