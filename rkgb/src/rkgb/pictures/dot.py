"""Write a sketch in the DOT language: boxes, colours, arrows and the legend.

Cells are grouped in boxes by module path; repeated layers have their own box with their number. In
a graph of forward and backward, each backward is on the level of its forward, and the arrows of
gradients run the other way. The second column is read upwards, the third downwards again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rkgb.elements.module_paths import common
from rkgb.pictures.columns import columns_of, grid
from rkgb.pictures.fold import Folding, fold
from rkgb.pictures.legend import (
    BACKWARD,
    FORWARD,
    GREY,
    PHANTOM,
    class_colour,
    label_of,
    legend,
    tone,
)
from rkgb.pictures.sketch import Arrow, Sketch, Vertex

_FONT = "Helvetica"


@dataclass
class _Modules:
    """Consecutive cells inside one module.

    A module that is entered a second time gets another box, because a box joins only neighbours.
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


def draw(sketch: Sketch, *, folded: bool = True, columns: int | None = None) -> Any:
    """Return a `graphviz.Digraph` of the sketch, with its legend below.

    `folded` draws equal neighbours once. `columns` is their number, or None for the number that
    shows the picture largest on a page.
    """
    import graphviz

    graph = graphviz.Digraph(
        graph_attr={
            **{"fontname": _FONT, "labelloc": "b", "labeljust": "l", "nodesep": "0.25"},
            **{"ranksep": "0.3", "pad": "0.2"},
        },
        node_attr={"fontname": _FONT, "fontsize": "11", "height": "0.3", "margin": "0.09,0.05"},
        edge_attr={"fontname": _FONT, "fontsize": "9", "arrowsize": "0.6", "color": GREY},
    )
    boxed = bool(sketch.parts)
    drawers = [
        _Drawer(part, f"p{i}_", boxed, folded, columns)
        for i, part in enumerate((sketch, *sketch.parts))
    ]
    if drawers[0].two_sided and not boxed:
        # Ranks across boxes keep forward left and backward right. In other graphs they would do
        # harm: dot cannot route some arrows then, and drops the boxes of packed parts.
        graph.attr(newrank="true")
    heaviest = {
        compute: max(drawer.heaviest(compute) for drawer in drawers) for compute in (True, False)
    }
    if boxed:
        # Each part is laid out alone; together they form a grid.
        order, across = grid([drawer.size for drawer in drawers])
        drawers = [drawers[i] for i in order]
        graph.attr(pack="14", packmode=f"array_it{across}")
    for drawer in drawers:
        part, prefix = drawer.sketch, drawer.prefix
        if not boxed:
            drawer.draw(graph, heaviest)
            continue
        fill = "#ffffff" if part.colour_class is None else class_colour(part.colour_class, 0.45)
        with graph.subgraph(name=f"cluster_{prefix}") as box:
            box.attr(
                label="chain of blocks" if part is sketch else part.title,
                **{"style": "rounded,filled", "fillcolor": fill, "color": GREY},
                **{"fontname": f"{_FONT}-Bold", "fontsize": "13", "labelloc": "t", "margin": "12"},
            )
            drawer.draw(box, heaviest)
    graph.attr(label=legend(sketch, any(drawer.folding.repeats for drawer in drawers)))
    return graph


class _Drawer:
    """Draws one sketch into a graph or a cluster."""

    def __init__(
        self, sketch: Sketch, prefix: str, boxed: bool, folded: bool, columns: int | None
    ) -> None:
        self.sketch = sketch
        self.prefix = prefix
        self.boxed = boxed
        cells = sketch.cells
        # Without folding all signatures differ.
        looks = [c.signature if folded else i for i, c in enumerate(cells)]
        self.folding: Folding = fold([c.path for c in cells], looks)
        self.two_sided = any("bwd" in cell.vertices for cell in cells)
        self.columns, self.size = columns_of(sketch, self.folding, columns)
        self.column = {c: i for i, column in enumerate(self.columns) for c in column}
        self.before: dict[int, list[int]] = {}  # for each drawn cell, the cells that it reads
        for arrow in sketch.arrows:
            ends = self.folding.edge(arrow.source[0], arrow.target[0])
            if ends is not None and ends[0] < ends[1]:
                self.before.setdefault(ends[1], []).append(ends[0])

    def heaviest(self, compute: bool) -> float:
        """Return the largest weight of the computations, or of the data."""
        cells = (self.sketch.cells[i] for i in self.folding.shown)
        weights = (
            v.weight for cell in cells for v in cell.vertices.values() if _is_compute(v) == compute
        )
        return max(weights, default=0.0)

    def draw(self, graph: Any, heaviest: Mapping[bool, float]) -> None:
        self.scale = heaviest
        if len(self.columns) == 1:
            self._draw_items(graph, list(self.folding.shown), 0)
        else:
            self._draw_columns(graph)
        self.links = self._links()
        drawn: set[tuple[str, str, str]] = set()
        for arrow in self.sketch.arrows:
            ends = self.folding.edge(arrow.source[0], arrow.target[0])
            if ends is not None:
                self._draw_arrow(graph, arrow, ends, drawn)
        for source, target in sorted(self.links):
            if (source, target, "value") not in drawn:
                graph.edge(source, target, style="invis", minlen="0", weight="4")

    def _draw_columns(self, graph: Any) -> None:
        # Inside a box, dot lays out boxes in the reverse order.
        order = list(enumerate(self.columns))
        for number, column in reversed(order) if self.boxed else order:
            with graph.subgraph(name=f"cluster_{self.prefix}column{number}") as box:
                box.attr(label="", style="invis", margin="4")
                self._draw_items(box, list(column), 0)

    def _links(self) -> set[tuple[str, str]]:
        """Return pairs that stand side by side: the end of a column, the beginning of the next."""
        links = set()
        for one, other in pairwise(self.columns):
            last, first = self._longest(one)[-1], self._longest(other)[0]
            role = "bwd" if "bwd" in self.sketch.cells[last].vertices else "fwd"
            links.add((self._id(last, role), self._id(first, "fwd")))
        return links

    def _longest(self, column: Sequence[int]) -> list[int]:
        """Return the longest chain of cells in a column, inputs left out."""
        inside = set(column)
        chains: dict[int, list[int]] = {}
        for cell in column:
            if self.sketch.cells[cell].vertices["fwd"].kind != "input":
                above = [chains[i] for i in self.before.get(cell, ()) if i in inside & set(chains)]
                chains[cell] = [*max(above, key=len, default=[]), cell]
        return max(chains.values(), key=len)

    def _upwards(self, cell: int) -> bool:
        """Return whether the cell's column is read from bottom to top."""
        return self.column[cell] % 2 == 1

    def _draw_items(self, graph: Any, cells: list[int], depth: int) -> None:
        """Draw cells; the cells of one repeat at nesting level `depth` share a box."""
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
                self._draw_badge(box, number, members[-1 if self._upwards(members[0]) else 0])
                self._draw_items(box, members, depth + 1)

    def _draw_badge(self, box: Any, number: int, top: int) -> None:
        # A vertex instead of the box's label, because arrows avoid vertices but not labels.
        repeat = self.folding.repeats[number]
        members = [
            index
            for index, place in enumerate(self.folding.places)
            if any(which == number for which, _ in place.copies)
        ]
        title = self.sketch.cells[members[0]].vertices["fwd"].title
        last = self.sketch.cells[members[-1]].vertices["fwd"].title
        label = label_of(f"{repeat.count} ×", [repeat.label or f"{title} … {last}"], "", "#ffffff")
        name = f"{self.prefix}badge{number}"
        box.node(name, label=label, shape="box", style="filled", fillcolor="#202020")
        if self._is_plain(number):
            # Nothing else is in the box. Beside it, the badge leaves the way from above free.
            box.edge(name, self._id(top, "fwd"), style="invis", minlen="0")
            return
        for role in self.sketch.cells[top].vertices:
            if not role.startswith("phantom"):
                box.edge(name, self._id(top, role), style="invis")

    def _is_plain(self, number: int) -> bool:
        """Return whether a repeat holds cells but no modules."""
        return not any(self.sketch.cells[cell].path for cell in self.folding.repeats[number].cells)

    def _draw_modules(self, graph: Any, cells: list[int]) -> None:
        root = _Modules()
        trail = [root]  # modules around the previous cell, outermost first
        before = -1
        for cell in cells:
            parts = [part for part in self.sketch.cells[cell].path.split(".") if part]
            kept = 0
            if cell == before + 1:
                names = [module.path.rpartition(".")[2] for module in trail[1:]]
                kept = len(common([names, parts]))
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
            if inner.size() == 1:  # no box around a single box: its path names the module
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
                if level == ["fwd", "bwd"]:  # forward left, even without a phantom between
                    row.edge(self._id(number, "fwd"), self._id(number, "bwd"), style="invis")

    def _id(self, cell: int, role: str) -> str:
        return f"{self.prefix}{cell}_{role.replace(' ', '_')}"

    def _style(self, vertex: Vertex, own_path: str) -> dict[str, str]:
        share = vertex.weight / (self.scale[_is_compute(vertex)] or 1.0)
        path = own_path if _is_compute(vertex) else ""
        style = {"label": label_of(vertex.title, vertex.detail.split("\n"), path)}
        if vertex.kind in ("fwd", "bwd"):
            base = FORWARD if vertex.kind == "fwd" else BACKWARD
            style |= {"shape": "box", "style": "rounded,filled", "fillcolor": tone(base, share)}
            style |= {"color": tone(base, 2.0), "penwidth": "1.2"}
        elif vertex.kind == "block":
            fill = class_colour(vertex.colour_class or 0)
            style |= {"shape": "box", "style": "rounded,filled", "fillcolor": fill, "color": GREY}
        elif vertex.kind in ("input", "output"):
            style |= {"shape": "box", "style": "filled", "fillcolor": "#f2f2f2", "color": GREY}
        else:
            width = 0.45 + 1.1 * share**0.5
            shapes = {"data": "ellipse", "grad": "ellipse", "phantom": "hexagon"}
            border = {"data": tone(FORWARD, 2.0), "grad": tone(BACKWARD, 2.0)}
            style |= {"shape": shapes[vertex.kind], "style": "filled", "fillcolor": "#ffffff"}
            style |= {"color": border.get(vertex.kind, PHANTOM), "width": f"{width:.2f}"}
            style |= {"height": f"{0.25 + 0.35 * share**0.5:.2f}", "margin": "0.02"}
            if vertex.kind == "phantom":
                style |= {"style": "filled,dashed", "fillcolor": "#f1ecf7"}
        return style

    def _draw_arrow(
        self, graph: Any, arrow: Arrow, ends: tuple[int, int], drawn: set[tuple[str, str, str]]
    ) -> None:
        source, target = self._id(ends[0], arrow.source[1]), self._id(ends[1], arrow.target[1])
        if source == target or (source, target, arrow.style) in drawn:
            return
        if arrow.style == "order" and (source, target, "value") in drawn:
            return
        drawn.add((source, target, arrow.style))
        styles = {
            "gradient": {"color": tone(BACKWARD, 2.0)},
            "saved": {"color": "#a0a0a0", "style": "dashed"},
            "order": {"style": "dotted"},
            "value": {},
        }
        style: dict[str, str] = styles[arrow.style]
        if self.column[ends[0]] != self.column[ends[1]]:
            # Edges of values take part in the ranking, which routes them best. Weight 0 keeps them
            # from moving anything.
            weight = "4" if (source, target) in self.links else "0"
            rank = {"minlen": "0", "weight": weight}
            rank = rank if arrow.style == "value" else {"constraint": "false"}
            graph.edge(source, target, **rank, **style)
        elif "phantom 0" in (arrow.source[1], arrow.target[1]):
            # On one level the arrow also decides what is left and what is right.
            graph.edge(source, target, **style)
        elif arrow.style == "saved":
            graph.edge(source, target, constraint="false", **style)
        elif (arrow.style == "gradient") != self._upwards(ends[0]):
            # The backward runs beside the forward in the other direction, against the ranks.
            graph.edge(target, source, dir="back", **style)
        else:
            graph.edge(source, target, **style)
        if arrow.style == "value":
            self._keep_above(graph, arrow, ends)

    def _keep_above(self, graph: Any, arrow: Arrow, ends: tuple[int, int]) -> None:
        """Draw what a repeat reads above its badge, and thereby above its box."""
        if self.column[ends[0]] != self.column[ends[1]]:
            return
        # In a column that is read upwards, the readers of the repeat stand above it.
        (out, role), (into, _) = zip(ends, (arrow.source[1], arrow.target[1]), strict=True)
        if self._upwards(into):
            (out, role), into = (ends[1], arrow.target[1]), ends[0]
        around = self.folding.places[out].copies
        for depth, (number, _) in enumerate(self.folding.places[into].copies):
            beside = self._is_plain(number)  # a badge beside its cells is safe
            if not beside and (depth >= len(around) or around[depth][0] != number):
                graph.edge(self._id(out, role), f"{self.prefix}badge{number}", style="invis")


def _is_compute(vertex: Vertex) -> bool:
    return vertex.kind in ("fwd", "bwd")
