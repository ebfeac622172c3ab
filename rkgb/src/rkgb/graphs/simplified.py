"""SimplifiedGraph (S): one real operation per node, with the views and in-place ops around it.

A node is the unit that is kept, freed and recomputed, so all values that share one storage must be
made in one node. Named passes over groups of operations turn D into S. Each pass can be applied
alone (`D_to_S(dg, passes=[...])`) and its result printed. Groups that form a cycle are merged, so
every choice of passes gives a valid graph.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any

import torch
from torch import nn

from rkgb.elements.op import VIEW_NAMES, Op, Ref
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.backward_slices import Slice, slice_backward
from rkgb.graphs.basic import BasicGraph, HandOver
from rkgb.graphs.dataflow import DataFlowGraph, Drawn
from rkgb.graphs.passes import PASSES, Groups, Pass
from rkgb.graphs.uses import Part, Uses, roots_of


@dataclass(frozen=True, slots=True, eq=False)
class SimplifiedNode:
    """A real operation (`main`) with its body: the unit of keeping and recomputing."""

    name: str
    ops: tuple[Op, ...]  # in program order
    positions: tuple[int, ...]  # of the operations in the program
    inputs: tuple[str, ...]  # values of other nodes that it reads
    externals: tuple[str, ...]  # parameters, buffers, constants and inputs of the model it reads
    outputs: tuple[str, ...]  # values that other nodes, a backward or the user read
    deps: tuple[int, ...]  # indices of the nodes it must follow
    is_random: bool
    written_buffers: tuple[str, ...]  # storages from before the forward that it writes to
    backward: tuple[Op, ...] = ()  # its part of the backward, in program order
    hand_overs: tuple[HandOver, ...] = ()  # gradients of leaves that this part completes

    @property
    def main(self) -> Op:
        """The operation after which the node is named."""
        for op in self.ops:
            if op.target_name not in VIEW_NAMES and not op.target_name.startswith("add_"):
                return op
        return self.ops[0]

    @property
    def module_path(self) -> str:
        return self.main.module_path

    @property
    def read_by_backward(self) -> tuple[str, ...]:
        """Values that its backward reads or passes to autograd, with repetitions."""
        given = (hand_over.value for hand_over in self.hand_overs)
        return (*(name for op in self.backward for name in op.inputs), *given)


@dataclass(frozen=True)
class SimplifiedGraph(Drawn):
    """A DAG of simplified nodes in execution order; a whole forward or a block of one."""

    dataflow: DataFlowGraph
    nodes: tuple[SimplifiedNode, ...]
    output_names: tuple[str, ...]  # values that leave the graph
    outputs: tuple[Any, ...]  # the forward's results: Ref or constant

    def __repr__(self) -> str:
        return f"<S graph of {self.basic.model_name}: {len(self.nodes)} nodes>"

    @property
    def basic(self) -> BasicGraph:
        """The recorded step."""
        return self.dataflow.basic

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Facts about every value."""
        return self.dataflow.basic.infos

    @cached_property
    def uses(self) -> Uses:
        """The uses of values in the forward; its parts are the nodes."""
        return forward_uses(self.nodes, self.infos)

    @cached_property
    def uses_behind(self) -> Uses:
        """The uses of values in the backward; its parts are the nodes', the last node first."""
        return backward_uses(self.nodes, self.infos)

    @property
    def producer(self) -> Mapping[str, int]:
        """Index of the node that makes each value, inner values included."""
        return self.uses.maker

    @property
    def written_roots(self) -> frozenset[str]:
        """Storages from before the step that it writes to."""
        return self.basic.written_roots

    @cached_property
    def output_roots(self) -> frozenset[str]:
        """Storages of values that leave the graph and live to the end of the step."""
        basic = self.basic
        return frozenset(roots_of(basic.infos, self.output_names) - basic.leaving_roots)

    def with_backward(self, basic: BasicGraph) -> SimplifiedGraph:
        """Return the same nodes with the backward of another recording of the same forward."""
        nodes = tuple(
            replace(node, backward=backward, hand_overs=hand_overs)
            for node, (backward, hand_overs) in zip(self.nodes, self.slices_of(basic), strict=True)
        )
        return replace(self.with_basic(basic), nodes=nodes)

    def slices_of(self, basic: BasicGraph) -> list[Slice]:
        """Return the part of each node of the backward of a recording of the same forward."""
        node_of = {place: i for i, node in enumerate(self.nodes) for place in node.positions}
        return slice_backward(basic, len(self.nodes), node_of)

    def with_basic(self, basic: BasicGraph) -> SimplifiedGraph:
        """Return the same nodes on another recording, or on other facts about its values."""
        return replace(self, dataflow=replace(self.dataflow, basic=basic))

    @cached_property
    def input_names(self) -> tuple[str, ...]:
        """Values that the graph reads but does not make; empty for a whole forward."""
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


def forward_uses(nodes: Sequence[SimplifiedNode], infos: Mapping[str, TensorInfo]) -> Uses:
    """Return the uses of values in the forwards of these nodes."""
    return Uses([Part(index, node.ops) for index, node in enumerate(nodes)], infos)


def backward_uses(nodes: Sequence[SimplifiedNode], infos: Mapping[str, TensorInfo]) -> Uses:
    """Return the uses of values in the backwards of these nodes; autograd reads at their ends."""
    parts = [
        Part(index, node.backward, [hand_over.value for hand_over in node.hand_overs])
        for index, node in enumerate(nodes)
    ]
    return Uses(parts[::-1], infos)


def with_reads(
    nodes: Sequence[SimplifiedNode], kept: Collection[str], infos: Mapping[str, TensorInfo]
) -> tuple[SimplifiedNode, ...]:
    """Return the nodes with their inputs, and with outputs that others read or that are `kept`."""
    uses = forward_uses(nodes, infos)
    home, readers = uses.maker, uses.readers
    result = []
    for index, node in enumerate(nodes):
        read = dict.fromkeys(name for op in node.ops for name in op.inputs)
        made = (name for op in node.ops for name in op.results if name)
        result.append(
            replace(
                node,
                inputs=tuple(n for n in read if home.get(n, index) != index),
                externals=tuple(n for n in read if n not in home),
                outputs=tuple(
                    n
                    for n in made
                    if n in kept or any(at.part != index for at in readers.get(n, ()))
                ),
            )
        )
    return tuple(result)


def D_to_S(
    dg: DataFlowGraph,
    model: nn.Module | None = None,
    device: torch.device | str | None = None,
    *,
    passes: Sequence[Pass] = PASSES,
) -> SimplifiedGraph:
    """Return the simplified graph that `passes` make of `dg`, applied in order.

    Nothing is run. `model` and `device` belong to the published signature and are not used.
    """
    groups = Groups.singletons(dg)
    for simplify in passes:
        simplify(groups)
    return _condense(groups)


def merging(sg: SimplifiedGraph, runs: Sequence[Sequence[int]]) -> Pass:
    """Return the pass that makes one node of each run of nodes of `sg`."""

    def merge_runs(groups: Groups) -> None:
        for run in runs:
            positions = [place for index in run for place in sg.nodes[index].positions]
            for place in positions[1:]:
                groups.merge(positions[0], place)

    return merge_runs


def cut(sg: SimplifiedGraph) -> list[SimplifiedGraph]:
    """Cut the graph wherever a single value that requires a gradient connects both sides.

    Concatenating the nodes of the blocks gives the nodes of `sg`. Values without gradient (masks,
    positions) may be read across a cut.
    """
    infos = sg.infos
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


def _group_deps(groups: Groups, members: Mapping[int, list[int]]) -> dict[int, list[int]]:
    """Return the groups that each group depends on."""
    producer = groups.dataflow.producer
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


def _in_order(deps: Mapping[int, Sequence[int]], members: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the groups so that each follows those it depends on, otherwise as in the program.

    Raises:
        CycleError: some depend on each other; it says which.
    """
    sorter = TopologicalSorter(deps)
    sorter.prepare()
    ready: list[tuple[int, int]] = []
    order: list[int] = []
    while sorter.is_active():
        for head in sorter.get_ready():
            heapq.heappush(ready, (members[head][0], head))
        order.append(heapq.heappop(ready)[1])
        sorter.done(order[-1])
    return order


def _condense(groups: Groups) -> SimplifiedGraph:
    while True:
        members = groups.members()
        deps = _group_deps(groups, members)
        try:
            order = _in_order(deps, members)
            break
        except CycleError as error:
            first, *others = error.args[1]
            for other in others:
                groups.merge(first, other)
    place = {head: position for position, head in enumerate(order)}

    basic = groups.dataflow.basic
    node_of = {index: place[groups.find(index)] for index in groups.alive()}
    slices = slice_backward(basic, len(order), node_of)
    nodes = []
    for head in order:
        indices = members[head]
        ops = tuple(groups.nodes[i].op for i in indices)
        written = dict.fromkeys(w for i in indices for w in groups.nodes[i].written)
        backward, hand_overs = slices[place[head]]
        nodes.append(
            SimplifiedNode(
                name="+".join(op.target_name for op in ops[:6]) + ("+..." if len(ops) > 6 else ""),
                ops=ops,
                positions=tuple(indices),
                inputs=(),
                externals=(),
                outputs=(),
                deps=tuple(sorted(place[d] for d in deps[head])),
                is_random=any(op.is_random for op in ops),
                written_buffers=tuple(w for w in written if w in groups.resident),
                backward=backward,
                hand_overs=hand_overs,
            )
        )
    made = forward_uses(nodes, basic.infos).maker
    returned = tuple(name for name in basic.output_names if name in made)
    ready = with_reads(nodes, groups.kept, basic.infos)
    return SimplifiedGraph(groups.dataflow, ready, returned, basic.outputs)


def operations(sg: SimplifiedGraph) -> tuple[Op, ...]:
    """Return every operation of a graph, forward and backward."""
    return tuple(op for node in sg.nodes for op in (*node.ops, *node.backward))
