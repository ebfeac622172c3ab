"""SimplifiedGraph (S): one real operation per node, with the views and in-place ops around it.

A node is the unit that is kept, freed and recomputed, so all values that share one storage must be
made in one node. D becomes S by named passes over groups of operations; each pass can be applied
alone (`D_to_S(dg, passes=[...])`) and its result printed. Groups that depend on each other in a
circle are merged, so every choice of passes gives a valid graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rkgb.dataflow import DataFlowGraph, DataFlowNode
from rkgb.op import Op, Ref, map_refs
from rkgb.op_kinds import VIEW_NAMES
from rkgb.topology import strongly_connected, topological_order


@dataclass(frozen=True, slots=True, eq=False)
class SimplifiedNode:
    """A real operation (`main`) and its body; the unit of keeping and recomputing."""

    name: str
    ops: tuple[Op, ...]  # in program order
    positions: tuple[int, ...]  # of the operations in the program
    inputs: tuple[str, ...]  # values of other nodes that it reads
    externals: tuple[str, ...]  # parameters, buffers, constants and inputs of the model it reads
    outputs: tuple[str, ...]  # values that other nodes or the user read
    deps: tuple[int, ...]  # indices of the nodes it must follow
    is_random: bool
    written_buffers: tuple[str, ...]

    @property
    def main(self) -> Op:
        """The operation that a reader would name the node after."""
        for op in self.ops:
            if op.target_name not in VIEW_NAMES and not op.target_name.startswith("add_"):
                return op
        return self.ops[0]

    @property
    def module_path(self) -> str:
        return self.main.module_path


@dataclass(frozen=True)
class SimplifiedGraph:
    """A DAG of simplified nodes in execution order; a whole forward or a piece of one."""

    dataflow: DataFlowGraph
    nodes: tuple[SimplifiedNode, ...]
    output_names: tuple[str, ...]  # values that leave the graph, identities resolved
    outputs: tuple[Any, ...]  # the forward's results: Ref or constant, identities resolved

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Index of the node that makes each value, inner values included."""
        return {op.name: i for i, node in enumerate(self.nodes) for op in node.ops}

    @cached_property
    def input_names(self) -> tuple[str, ...]:
        """Values that the graph reads and does not make: empty for a whole forward."""
        made = self.producer
        names = (name for node in self.nodes for name in node.inputs if name not in made)
        return tuple(dict.fromkeys(names))

    def __str__(self) -> str:
        lines = []
        for index, node in enumerate(self.nodes):
            marks = " random" if node.is_random else ""
            if node.written_buffers:
                marks += f" updates {', '.join(node.written_buffers)}"
            after = f" after {', '.join(map(str, node.deps))}" if node.deps else ""
            place = f"({node.module_path or 'root'}, {node.main.source})"
            lines.append(f"[{index}] {node.name} {place}{after}{marks}")
            lines += [f"    {op}" for op in node.ops]
        return "\n".join([*lines, f"return {', '.join(map(repr, self.outputs))}"])


@dataclass
class Groups:
    """The passes' working state: operations, which are dropped, and which belong together."""

    dataflow: DataFlowGraph
    nodes: list[DataFlowNode]
    outputs: list[Any]
    dropped: set[int]
    parent: list[int]

    @classmethod
    def singletons(cls, dg: DataFlowGraph) -> Groups:
        count = len(dg.nodes)
        return cls(dg, list(dg.nodes), list(dg.basic.outputs), set(), list(range(count)))

    def find(self, index: int) -> int:
        while self.parent[index] != index:
            self.parent[index] = self.parent[self.parent[index]]
            index = self.parent[index]
        return index

    def merge(self, first: int, second: int) -> None:
        a, b = sorted((self.find(first), self.find(second)))
        self.parent[b] = a

    def alive(self) -> Iterable[int]:
        return (index for index in range(len(self.nodes)) if index not in self.dropped)

    def users(self) -> dict[str, list[int]]:
        table: dict[str, list[int]] = {}
        for index in self.alive():
            for name in dict.fromkeys(self.nodes[index].op.inputs):
                table.setdefault(name, []).append(index)
        return table

    def root(self, name: str) -> str | None:
        info = self.dataflow.infos.get(name)
        return info.alias_of if info is not None else None


Pass = Callable[[Groups], None]


def drop_identities(groups: Groups) -> None:
    """Drop operations that returned their input itself; rename what an in-place result replaced.

    Two names of one tensor would have their gradients summed in another order than autograd's.
    """
    renamed: dict[str, str] = {}

    def current(name: str) -> Ref:
        while name in renamed:
            name = renamed[name]
        return Ref(name)

    for index, node in enumerate(groups.nodes):
        op = node.op
        if any(name in renamed for name in op.inputs):
            op = replace(
                op, args=map_refs(op.args, current), kwargs=map_refs(dict(op.kwargs), current)
            )
            groups.nodes[index] = replace(node, op=op)
        if node.same_as is None:
            continue
        if not node.written:
            groups.dropped.add(index)
            renamed[op.name] = current(node.same_as).name
        elif node.same_as in groups.dataflow.producer:
            renamed[current(node.same_as).name] = op.name
    groups.outputs = [map_refs(out, current) for out in groups.outputs]


def drop_dead(groups: Groups) -> None:
    """Drop what neither the outputs nor the random stream nor a buffer depends on."""
    needed = {out.name for out in groups.outputs if isinstance(out, Ref)}
    roots = {groups.root(name) for name in needed}
    for index in reversed(range(len(groups.nodes))):
        if index in groups.dropped:
            continue
        node = groups.nodes[index]
        writes = any(name in roots or name in _buffers(groups) for name in node.written)
        if node.op.name in needed or node.is_random or writes:
            needed.update(node.op.inputs)
            roots.update(groups.root(name) for name in node.op.inputs)
            roots.add(groups.root(node.op.name))
        else:
            groups.dropped.add(index)


def merge_views(groups: Groups) -> None:
    """Put every view, and every part of a tuple, into the node that made the storage."""
    producer = groups.dataflow.producer
    for index in groups.alive():
        op = groups.nodes[index].op
        if op.target_name == "getitem" and op.inputs and op.inputs[0] in producer:
            groups.merge(index, producer[op.inputs[0]])
        storages = [groups.root(op.name)]
        if storages[0] is None:  # a tuple: its parts may be views of the input
            storages = [
                info.alias_of
                for part in range(_tuple_length(groups, op.name))
                if (info := groups.dataflow.infos.get(f"{op.name}[{part}]")) is not None
            ]
        for storage in storages:
            maker = (storage or "").split("[")[0]
            if maker in producer and producer[maker] not in groups.dropped:
                groups.merge(index, producer[maker])


def merge_inplace(groups: Groups) -> None:
    """Put an in-place operation, and who read the old content, into the node of its target."""
    producer = groups.dataflow.producer
    readers: dict[str | None, list[int]] = {}
    for index in groups.alive():
        for storage in {groups.root(name) for name in groups.nodes[index].op.inputs}:
            readers.setdefault(storage, []).append(index)
    for index in groups.alive():
        for storage in groups.nodes[index].written:
            maker = storage.split("[")[0]
            if maker not in producer:
                continue
            groups.merge(index, producer[maker])
            for other in readers.get(storage, ()):
                if producer[maker] < other < index:
                    groups.merge(index, other)


def merge_constants(groups: Groups) -> None:
    """Join connected operations that need no gradient and depend on nothing that does.

    Masks, positions and rotary tables come from dozens of tiny operations. What precedes the
    network can be one node without making a circle: all its ancestors are in the same set.
    """
    producer = groups.dataflow.producer
    written_buffers = _written_buffers(groups)
    plain: set[int] = set()
    for index in groups.alive():
        node = groups.nodes[index]
        sources = [producer[name] for name in node.op.inputs if name in producer]
        infos = groups.dataflow.infos
        values = [node.op.name, *(f"{node.op.name}[{i}]" for i in range(8))]
        wants_grad = any(infos[v].requires_grad for v in values if v in infos)
        reads_grad = any(infos[n].requires_grad for n in node.op.inputs if n in infos)
        touches_written = any(name in written_buffers for name in node.op.inputs)
        if wants_grad or reads_grad or node.is_random or node.written or touches_written:
            continue
        if all(source in plain for source in sources):
            plain.add(index)
            for source in sources:
                groups.merge(index, source)


def merge_resident_views(groups: Groups) -> None:
    """Put a view of a parameter, buffer or input into its reader, when there is only one."""
    producer = groups.dataflow.producer
    users = groups.users()
    returned = {out.name for out in groups.outputs if isinstance(out, Ref)}
    for index in reversed(list(groups.alive())):
        op = groups.nodes[index].op
        storage = groups.root(op.name)
        if storage is None:
            part = groups.dataflow.infos.get(f"{op.name}[0]")
            storage = part.alias_of if part is not None else op.name
        if storage.split("[")[0] in producer or op.name in returned:
            continue
        readers = {groups.find(user) for user in users.get(op.name, ())}
        if len(readers) == 1:
            groups.merge(index, readers.pop())


def merge_effects(groups: Groups) -> None:
    """Put an operation that only updates a buffer into the node that follows it."""
    users = groups.users()
    alive = list(groups.alive())
    returned = {out.name for out in groups.outputs if isinstance(out, Ref)}
    for place, index in enumerate(alive):
        node = groups.nodes[index]
        updates = node.written and not any(w in groups.dataflow.producer for w in node.written)
        unread = not users.get(node.op.name) and node.op.name not in returned
        if updates and unread and place + 1 < len(alive):
            groups.merge(index, alive[place + 1])


PASSES: tuple[Pass, ...] = (
    drop_identities,
    drop_dead,
    merge_views,
    merge_inplace,
    merge_constants,
    merge_resident_views,
    merge_effects,
)


def D_to_S(
    dg: DataFlowGraph,
    model: nn.Module | None = None,
    device: torch.device | str | None = None,
    *,
    passes: Sequence[Pass] = PASSES,
) -> SimplifiedGraph:
    """Return the simplified graph that `passes` make of `dg`, applied in order.

    `model` and `device` belong to the published signature; nothing is run, so they are not used.
    """
    groups = Groups.singletons(dg)
    for simplify in passes:
        simplify(groups)
    return _condense(groups)


def cut(sg: SimplifiedGraph) -> list[SimplifiedGraph]:
    """Cut the graph where a single value that requires a gradient connects what is on both sides.

    Concatenating the nodes of the pieces gives the nodes of `sg`. Values without gradient that
    were made before the cut (masks, positions) may be read after it.
    """
    infos = sg.dataflow.infos
    last_reader = {name: i for i, node in enumerate(sg.nodes) for name in node.inputs}
    returned = set(sg.output_names)
    crossing: set[str] = set()
    cuts = []
    for index, node in enumerate(sg.nodes[:-1]):
        crossing.update(name for name in node.outputs if infos[name].requires_grad)
        crossing = {name for name in crossing if last_reader.get(name, -1) > index}
        storages = {infos[name].alias_of for name in crossing}
        if len(storages) == 1 and not crossing & returned:
            cuts.append(index + 1)
    bounds = [0, *cuts, len(sg.nodes)]
    return [_piece(sg, low, high) for low, high in itertools.pairwise(bounds)]


def _piece(sg: SimplifiedGraph, low: int, high: int) -> SimplifiedGraph:
    later = {name for node in sg.nodes[high:] for name in node.inputs} | set(sg.output_names)
    nodes = tuple(
        replace(node, deps=tuple(d - low for d in node.deps if d >= low))
        for node in sg.nodes[low:high]
    )
    names = tuple(name for node in nodes for name in node.outputs if name in later)
    return SimplifiedGraph(sg.dataflow, nodes, names, tuple(Ref(name) for name in names))


def _condense(groups: Groups) -> SimplifiedGraph:
    producer = groups.dataflow.producer

    def grouped() -> dict[int, list[int]]:
        members: dict[int, list[int]] = {}
        for index in groups.alive():
            members.setdefault(groups.find(index), []).append(index)
        return members

    def group_deps(members: Mapping[int, list[int]]) -> dict[int, list[int]]:
        deps: dict[int, list[int]] = {}
        for head, indices in members.items():
            found: dict[int, None] = {}
            for index in indices:
                node = groups.nodes[index]
                sources = [producer[n] for n in node.op.inputs if n in producer]
                for source in (*sources, *node.order_deps):
                    if source not in groups.dropped and groups.find(source) != head:
                        found[groups.find(source)] = None
            deps[head] = list(found)
        return deps

    members = grouped()
    for component in strongly_connected(group_deps(members)):
        for other in component[1:]:
            groups.merge(component[0], other)
    members = grouped()
    deps = group_deps(members)
    order = topological_order(deps, {head: indices[0] for head, indices in members.items()})
    place = {head: position for position, head in enumerate(order)}

    made = {groups.nodes[i].op.name for i in groups.alive()}
    home = {groups.nodes[i].op.name: groups.find(i) for i in groups.alive()}
    readers: dict[str, set[int]] = {}
    for index in groups.alive():
        for name in groups.nodes[index].op.inputs:
            readers.setdefault(name, set()).add(groups.find(index))
    returned = dict.fromkeys(out.name for out in groups.outputs if isinstance(out, Ref))
    buffers = _buffers(groups)
    nodes = []
    for head in order:
        indices = members[head]
        ops = tuple(groups.nodes[i].op for i in indices)
        read = list(dict.fromkeys(name for op in ops for name in op.inputs))
        written = dict.fromkeys(w for i in indices for w in groups.nodes[i].written)
        nodes.append(
            SimplifiedNode(
                name="+".join(op.target_name for op in ops[:6]) + ("+..." if len(ops) > 6 else ""),
                ops=ops,
                positions=tuple(indices),
                inputs=tuple(n for n in read if n in made and home[n] != head),
                externals=tuple(n for n in read if n not in made),
                outputs=tuple(
                    op.name
                    for op in ops
                    if op.name in returned or readers.get(op.name, set()) - {head}
                ),
                deps=tuple(sorted(place[d] for d in deps[head])),
                is_random=any(groups.nodes[i].is_random for i in indices),
                written_buffers=tuple(w for w in written if w in buffers),
            )
        )
    return SimplifiedGraph(
        groups.dataflow,
        tuple(nodes),
        tuple(name for name in returned if name in made),
        tuple(groups.outputs),
    )


def _buffers(groups: Groups) -> Mapping[str, str]:
    return groups.dataflow.basic.buffers


def _written_buffers(groups: Groups) -> set[str]:
    written = {name for node in groups.dataflow.nodes for name in node.written}
    return written & set(_buffers(groups))


def _tuple_length(groups: Groups, name: str) -> int:
    length = 0
    while f"{name}[{length}]" in groups.dataflow.infos:
        length += 1
    return length


def print_S_graph(
    sg: SimplifiedGraph,
    name: str | None = None,
    open: bool = False,
    render_format: str = "svg",
) -> Path | None:
    """Draw one simplified graph into a file; see `rkgb.print_graph`."""
    from rkgb.render import print_graph

    return print_graph(sg, name, open, render_format)


def print_S_graph_list(
    list_sg: Sequence[SimplifiedGraph],
    name: str | None = None,
    open: bool = False,
    render_format: str = "svg",
) -> Path | None:
    """Draw a list of pieces into a file; see `rkgb.print_graph`."""
    from rkgb.render import print_graph

    return print_graph(list_sg, name, open, render_format)
