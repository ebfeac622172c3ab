"""What a picture of each kind of graph shows: a row of cells, their content, and the arrows.

Nothing here knows Graphviz. A cell is one forward operation with its results, their gradients, its
phantoms and its backward. Cells are folded and grouped by module.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rkgb.atlas.anonymize import anonymize, equivalence_classes, node_key
from rkgb.atlas.forward_backward import KComputeNode, KGraph
from rkgb.elements.module_paths import around
from rkgb.elements.op import Ref
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.dataflow import DataFlowGraph
from rkgb.graphs.simplified import SimplifiedGraph, SimplifiedNode

Kind = Literal["fwd", "bwd", "data", "grad", "phantom", "input", "output", "block"]


@dataclass(frozen=True, slots=True)
class Vertex:
    """One vertex of the picture; its shade or its size shows `weight`."""

    title: str
    detail: str
    kind: Kind
    weight: float = 0.0
    colour_class: int | None = None


@dataclass(frozen=True)
class Cell:
    """The vertices of one forward operation, by role ('fwd', 'bwd', 'phantom', 'data 0', …)."""

    path: str
    signature: Hashable
    vertices: Mapping[str, Vertex]


@dataclass(frozen=True, slots=True)
class Arrow:
    """An arrow between two vertices (cell, role); with style `order` no value flows."""

    source: tuple[int, str]
    target: tuple[int, str]
    style: Literal["value", "gradient", "saved", "order"] = "value"


@dataclass(frozen=True)
class Sketch:
    """A picture before it is drawn."""

    title: str
    cells: tuple[Cell, ...]
    arrows: tuple[Arrow, ...]
    shade: str  # what the shade means
    size: str = ""  # what the size means
    parts: tuple[Sketch, ...] = ()  # pictures beside it: each class of blocks in detail
    colour_class: int | None = None


def sketch_dataflow(dg: DataFlowGraph) -> Sketch:
    """Every operation with its data edges; dotted, the order due to memory and random numbers."""
    cells: list[Cell] = []
    place: dict[str, int] = {}
    _add_inputs(cells, place, dg)
    base = len(cells)
    arrows: list[Arrow] = []
    for index, node in enumerate(dg.nodes):
        info = dg.infos.get(node.op.name)
        shares = info is not None and info.alias_of != node.op.name
        marks = [m for m, on in (("random", node.op.is_random), ("view", shares)) if on]
        marks += ["in place"] if node.written else []
        size = info.size_bytes if info is not None and not shares else 0
        title = node.op.target_name
        vertex = Vertex(title, _detail(info, marks), "fwd", size)
        cells.append(Cell(node.op.module_path, (title, str(info), *marks), {"fwd": vertex}))
        place.update((name, base + index) for name in node.op.results if name)
        for name in dict.fromkeys(node.op.inputs):
            if name in place:
                arrows.append(Arrow((place[name], "fwd"), (base + index, "fwd")))
        arrows += [
            Arrow((base + dep, "fwd"), (base + index, "fwd"), "order") for dep in node.order_deps
        ]
    _add_output(cells, arrows, place, dg.basic.outputs)
    return Sketch(
        f"{dg.basic.model_name}: data flow", tuple(cells), tuple(arrows), "bytes of the result"
    )


def sketch_simplified(sg: SimplifiedGraph, *, piece: bool = False) -> Sketch:
    """One box per node; a part of a larger graph is drawn without inputs and results."""
    cells: list[Cell] = []
    place: dict[str, int] = {}
    if not piece:
        _add_inputs(cells, place, sg.dataflow)
    base = len(cells)
    arrows: list[Arrow] = []
    infos = sg.infos
    for index, node in enumerate(sg.nodes):
        made = _made_by(node, infos)
        marks = ["random"] if node.is_random else []
        marks += ["updates buffers"] if node.written_buffers else []
        body = list(dict.fromkeys(op.target_name for op in node.ops if op is not node.main))
        marks += [f"with {', '.join(body[:3])}{', …' if len(body) > 3 else ''}"] if body else []
        # Of a split, say, the whole that its views share.
        wholes = [infos[name] for name in dict.fromkeys(i.alias_of for i in made)]
        size = sum(whole.size_bytes for whole in wholes)
        shown = infos.get(node.main.name)
        if shown not in wholes:
            shown = max(wholes, key=lambda info: info.size_bytes, default=None)
        vertex = Vertex(node.main.target_name, _detail(shown, marks), "fwd", size)
        cells.append(Cell(node.module_path, node_key(sg, node), {"fwd": vertex}))
        for op in node.ops:
            place.update((name, base + index) for name in op.results if name)
        readable = (*node.inputs, *(() if piece else node.externals))
        known = {place[name] for name in readable if name in place}
        arrows += [Arrow((i, "fwd"), (base + index, "fwd")) for i in sorted(known)]
        arrows += [
            Arrow((base + dep, "fwd"), (base + index, "fwd"), "order")
            for dep in node.deps
            if base + dep not in known
        ]
    if not piece:
        _add_output(cells, arrows, place, sg.outputs)
    name = sg.basic.model_name
    return Sketch(f"{name}: simplified", tuple(cells), tuple(arrows), "bytes of the result")


def _made_by(node: SimplifiedNode, infos: Mapping[str, TensorInfo]) -> list[TensorInfo]:
    """Return what a node makes: no views of what was there, as a transposed weight is one.

    Integers beside other results, such as the places of maxima, are not what it is for.
    """
    own = {name for op in node.ops for name in op.results}
    made = [infos[name] for name in node.outputs if name in infos and infos[name].alias_of in own]
    numbers = [i for i in made if i.dtype.is_floating_point or i.dtype.is_complex]
    return numbers or made


def sketch_k(kg: KGraph, title: str = "") -> Sketch:
    """Forward and backward side by side, with data, gradients and phantoms."""
    forward = {node.node: node for node in kg.compute if node.kind == "fwd"}
    backward = {node.node: node for node in kg.compute if node.kind == "bwd"}
    order = sorted(forward)
    number = {node: index for index, node in enumerate(order)}
    where: dict[str, tuple[int, str]] = {}
    vertices: list[dict[str, Vertex]] = []
    for node in order:
        mine = {"fwd": _compute(forward[node])}
        where[forward[node].name] = (number[node], "fwd")
        if node in backward:
            mine["bwd"] = _compute(backward[node])
            where[backward[node].name] = (number[node], "bwd")
        vertices.append(mine)
    arrows: list[Arrow] = []
    for data in kg.data:
        home = data.users[0] if data.kind == "grad" else data.producers[0]
        cell = where[home][0]
        role = f"{data.kind} {sum(r.startswith(data.kind) for r in vertices[cell])}"
        word = {"data": "", "grad": "gradient", "phantom": "phantom"}[data.kind]
        vertices[cell][role] = Vertex(word, _bytes(data.size_bytes), data.kind, data.size_bytes)
        style: Literal["value", "gradient"] = "gradient" if data.kind == "grad" else "value"
        for name in data.producers:
            arrows.append(Arrow(where[name], (cell, role), style))
        for name in data.users:
            saved = data.kind != "grad" and name.startswith("bwd")
            arrows.append(Arrow((cell, role), where[name], "saved" if saved else style))
    cells = [
        Cell(
            forward[node].module_path,
            (forward[node].op, forward[node].key, *_look(vertices[i])),
            vertices[i],
        )
        for i, node in enumerate(order)
    ]
    title = f"{title}: forward and backward" if title else "forward and backward"
    return Sketch(title, tuple(cells), tuple(arrows), "time", "bytes")


def sketch_list(graphs: Sequence[SimplifiedGraph | KGraph], title: str = "blocks") -> Sketch:
    """The chain of blocks, equal ones in one colour, and beside it each class in detail."""
    keys = [anonymize(g).key if isinstance(g, SimplifiedGraph) else _k_key(g) for g in graphs]
    classes = equivalence_classes(keys)
    class_of = {index: number for number, members in enumerate(classes) for index in members}
    cells = []
    for index, graph in enumerate(graphs):
        nodes = graph.nodes if isinstance(graph, SimplifiedGraph) else graph.compute
        number = class_of[index]
        where = around([node.module_path for node in nodes])
        count = f"class {number}, {len(nodes)} node{'s' if len(nodes) > 1 else ''}"
        vertex = Vertex(
            f"block {index}", f"{count}\n{where}".strip(), "block", float(len(nodes)), number
        )
        # Blocks have no path: one module is often several blocks, and only the chain matters.
        cells.append(Cell("", number, {"fwd": vertex}))
    arrows = [Arrow((i, "fwd"), (i + 1, "fwd")) for i in range(len(graphs) - 1)]
    parts = []
    for number, members in enumerate(classes):
        graph = graphs[members[0]]
        if isinstance(graph, SimplifiedGraph):
            part = sketch_simplified(graph, piece=True)
        else:
            part = sketch_k(graph)
        times = f"{len(members)} block{'s' if len(members) > 1 else ''}"
        parts.append(replace(part, title=f"class {number}, {times}", colour_class=number))
    shade, size = (parts[0].shade, parts[0].size) if parts else ("", "")
    return Sketch(title, tuple(cells), tuple(arrows), shade, size, tuple(parts))


def _k_key(kg: KGraph) -> str:
    compute = [(n.kind, n.op, n.key) for n in kg.compute]
    data = [(d.kind, d.size_bytes, len(d.producers), len(d.users)) for d in kg.data]
    return repr((compute, data))


def _look(vertices: Mapping[str, Vertex]) -> Iterator[Hashable]:
    """Yield what equal cells must share. Measured times may differ."""
    for role, vertex in vertices.items():
        yield role, vertex.title, "" if vertex.kind in ("fwd", "bwd") else vertex.detail


def _compute(node: KComputeNode) -> Vertex:
    parts = [f"{_number(node.time_ms)} ms"]
    if node.overhead_bytes:
        parts.append(f"+{_bytes(node.overhead_bytes)}")
    title = node.op or node.name
    return Vertex(title, ", ".join(parts), node.kind, node.time_ms)


def _add_inputs(cells: list[Cell], place: dict[str, int], dg: DataFlowGraph) -> None:
    read = {name for node in dg.nodes for name in node.op.inputs}
    read |= {out.name for out in dg.basic.outputs if isinstance(out, Ref)}
    for name in dg.basic.inputs:
        if name is not None and name in read:
            vertex = Vertex(name, _detail(dg.infos.get(name), []), "input")
            place[name] = len(cells)
            cells.append(Cell("", ("input", name), {"fwd": vertex}))


def _add_output(
    cells: list[Cell], arrows: list[Arrow], place: Mapping[str, int], outputs: Sequence[Any]
) -> None:
    names = dict.fromkeys(out.name for out in outputs if isinstance(out, Ref) and out.name in place)
    vertex = Vertex("result" if len(names) == 1 else "results", "", "output")
    arrows += [
        Arrow((i, "fwd"), (len(cells), "fwd")) for i in dict.fromkeys(place[n] for n in names)
    ]
    cells.append(Cell("", "output", {"fwd": vertex}))


def _detail(info: TensorInfo | None, marks: Sequence[str]) -> str:
    if info is None:
        return ", ".join(marks)
    shape = " × ".join(map(str, info.shape)) or "scalar"
    if str(info.dtype) != "torch.float32":
        shape += f" {str(info.dtype).removeprefix('torch.')}"
    return "\n".join(
        [f"{shape}, {_bytes(info.size_bytes)}", *([", ".join(marks)] if marks else [])]
    )


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{_number(size)} {unit}"
        size /= 1024
    return f"{_number(size)} GiB"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
