"""Put parts that run piece by piece into a simplified graph, each as one node.

Worth cutting are runs that contain the largest values. A run grows around the largest value that is
in no run yet, until all values at its ends are at most half as large. The head of a language model
is one run from hidden states to loss; a block of two linear layers is one run around its hidden
layer. What makes its inputs out of smaller values, as an upsampling does, and for it alone, is in
the run, too, unless it cannot be cut.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rkgb.errors import NotByPiecesError
from rkgb.graphs.basic import BasicGraph
from rkgb.graphs.dataflow import DataFlowGraph
from rkgb.graphs.passes import PLANNED_PASSES
from rkgb.graphs.simplified import D_to_S, SimplifiedGraph, SimplifiedNode, merging
from rkgb.rows.compiling import compiled_loops
from rkgb.rows.cuts import EVEN, Cuts, Runs, Shape, spread, spread_from
from rkgb.rows.node import NodeInPieces, Rows
from rkgb.rows.same_bits import BitsOfPieces
from rkgb.run.graph.node_storages import NodeStorage, storages_of

_log = logging.getLogger("rkgb")


@dataclass(frozen=True, slots=True)
class Cut:
    """What to cut in about `count` pieces of rows: the widest runs of nodes, and single nodes.

    The same cut of the same recording gives the same pieces.
    """

    count: int
    most: int | None = None  # of the runs, the widest ones first; None: all
    alone: tuple[int, ...] = ()  # nodes, unless a run has them
    is_exact: bool = False  # only in pieces that have the bits of the whole


@dataclass(frozen=True)
class CutNode:
    """A node that runs piece by piece."""

    index: int
    count: int
    module_path: str
    name: str  # of the operations
    rows: Rows  # what is cut first
    makes_gradients: bool = False  # of a loss, along with the forward
    is_compiled: bool = False  # between its products

    def __str__(self) -> str:
        where = self.module_path or "(root)"
        how = "each computed again in the backward"
        if self.makes_gradients:
            how = "each with its gradients, which the backward scales"
        rest = "" if self.rows[2] == EVEN else ", the last with fewer"
        code = "compiled " if self.is_compiled else ""
        return f"{self.name} ({where}): {self.count} {code}pieces of rows{rest}, {how}"


@dataclass(frozen=True)
class CutGraph:
    """A graph in which some nodes run piece by piece."""

    graph: SimplifiedGraph
    merged: SimplifiedGraph  # the same nodes, as recorded
    nodes: tuple[CutNode, ...]
    how: Cut
    refused: tuple[str, ...] = field(default=())  # runs that stay whole, and why
    is_compiled: bool = False

    def with_backward(self, basic: BasicGraph, same_bits: BitsOfPieces | None = None) -> CutGraph:
        """Return the same cuts with the backward of another recording of the same forward.

        Raises:
            NotByPiecesError: it reads values that this forward does not keep.
        """
        return self.in_graph(self.merged.with_backward(basic), same_bits)

    def in_graph(self, merged: SimplifiedGraph, same_bits: BitsOfPieces | None = None) -> CutGraph:
        """Return the same cuts in another graph of the step that has the nodes to be cut.

        Raises:
            NotByPiecesError: a backward reads values that this forward does not keep.
        """
        at = [_home(merged, self.merged, (node.index,)) for node in self.nodes]
        cut = [
            NodeInPieces(merged, index, node.rows, same_bits, is_compiled=self.is_compiled)
            for index, node in zip(at, self.nodes, strict=True)
        ]
        graph = _with_cut(merged, {node.index: node.replaced() for node in cut}, cut)
        nodes = (replace(node, index=i) for i, node in zip(at, self.nodes, strict=True))
        found = replace(self, graph=graph, merged=merged, nodes=tuple(nodes))
        return _compiled(found) if self.is_compiled else found


def cut_in_rows(
    dg: DataFlowGraph, how: Cut, same_bits: BitsOfPieces | None = None, *, is_compiled: bool = False
) -> CutGraph:
    """Return the planned graph of `dg` with its largest parts in pieces of rows.

    For exact pieces `same_bits` is the test of operations. Others may be compiled.
    """
    is_compiled = is_compiled and not how.is_exact
    plain = D_to_S(dg, passes=PLANNED_PASSES)
    why: list[str] = []
    first_cut = partial(_first_cut, count=how.count, same_bits=same_bits, is_compiled=is_compiled)

    def can_be_cut(run: Sequence[int], wide: str) -> bool:
        try:
            merged, index = _merged(dg, plain, run)
            first_cut(merged, index, wide)
        except NotByPiecesError as error:
            main = plain.nodes[run[0]]
            why.append(f"{main.module_path or '(root)'} ({main.name}): {error}")
            return False
        return True

    runs: list[tuple[Run, str]] = []
    taken: set[int] = set()
    for run, wide in wide_runs(plain, is_exact=how.is_exact):
        if len(runs) != how.most and taken.isdisjoint(run) and can_be_cut(run, wide):
            runs.append((run, wide))
            taken.update(run)
    runs += [
        ((index,), "")
        for index in how.alone  # of the sample's graph: that of another call may be shorter
        if index not in taken and index < len(plain.nodes) and can_be_cut((index,), "")
    ]
    merged = D_to_S(dg, passes=(*PLANNED_PASSES, merging(plain, [run for run, _ in runs])))
    nodes: dict[int, SimplifiedNode] = {}
    cut, made = [], []
    try:
        for chosen, wide in runs:
            index = _home(merged, plain, chosen)
            node, own, nodes[index] = first_cut(merged, index, wide)
            cut.append(node)
            made.append(own)
    except NotByPiecesError as error:  # each can be cut alone, but not all together
        _log.debug("only the widest part is cut: %s", error)
        how = replace(how, most=1, alone=())
        return cut_in_rows(dg, how, same_bits, is_compiled=is_compiled)
    found = CutGraph(_with_cut(merged, nodes, made), merged, tuple(cut), how, tuple(why))
    return _compiled(found) if is_compiled else found


def _compiled(cut: CutGraph) -> CutGraph:
    nodes, found = [*cut.graph.nodes], []
    for node in cut.nodes:
        before = nodes[node.index]
        nodes[node.index] = compiled_loops(cut.graph, before)
        found.append(replace(node, is_compiled=nodes[node.index] is not before))
    graph = replace(cut.graph, nodes=tuple(nodes))
    return replace(cut, graph=graph, nodes=tuple(found), is_compiled=True)


def _with_cut(
    merged: SimplifiedGraph, nodes: Mapping[int, SimplifiedNode], cut: Sequence[NodeInPieces]
) -> SimplifiedGraph:
    """Return a graph with these nodes in the place of its own, and the values that they add."""
    basic = merged.basic
    infos = dict(basic.infos)
    for node in cut:
        infos.update(node.inner | node.added)
    own = tuple(nodes.get(index, node) for index, node in enumerate(merged.nodes))
    return replace(merged.with_basic(replace(basic, infos=infos)), nodes=own)


def _merged(
    dg: DataFlowGraph, plain: SimplifiedGraph, run: Sequence[int]
) -> tuple[SimplifiedGraph, int]:
    """Return the graph in which a run of nodes is one node, and the index of that node."""
    merged = D_to_S(dg, passes=(*PLANNED_PASSES, merging(plain, [run])))
    return merged, _home(merged, plain, run)


def _home(merged: SimplifiedGraph, plain: SimplifiedGraph, run: Sequence[int]) -> int:
    positions = {place for index in run for place in plain.nodes[index].positions}
    for index, node in enumerate(merged.nodes):
        if not positions.isdisjoint(node.positions):
            if {*node.positions} != positions:
                raise NotByPiecesError("other operations depend on it in a circle")
            return index
    raise NotByPiecesError("nothing of it is left")


def _first_cut(
    sg: SimplifiedGraph,
    index: int,
    wide: str,
    *,
    count: int,
    same_bits: BitsOfPieces | None,
    is_compiled: bool,
) -> tuple[CutNode, NodeInPieces, SimplifiedNode]:
    """Cut a node along the first rows for which every operation has a rule.

    Raises:
        NotByPiecesError: there are no such rows.
    """
    node = sg.nodes[index]
    why = "nothing comes in that has rows"
    for rows in _rows(sg, node, count):
        try:
            own = NodeInPieces(sg, index, rows, same_bits, is_compiled=is_compiled)
            changed = own.replaced(wide)
            path = node.main.module_path
            found = CutNode(index, own.count, path, node.name, rows, own.makes_gradients)
            return found, own, changed
        except NotByPiecesError as error:
            why = str(error)
    raise NotByPiecesError(why)


def _rows(sg: SimplifiedGraph, node: SimplifiedNode, count: int) -> Iterator[Rows]:
    """Yield the inputs of a node, each with every way to cut it in rows."""
    infos, basic = sg.infos, sg.basic
    held = {*basic.parameters, *basic.buffers, *basic.constants}
    made = {name for op in node.ops for name in op.results}
    read = dict.fromkeys(name for op in node.ops for name in op.inputs)
    names = [name for name in read if name not in made and infos[name].alias_of not in held]
    names.sort(key=lambda name: not infos[name].requires_grad)
    # Rows that are flat here may be those of a batch and a length, and cut along both there.
    shapes = dict.fromkeys(infos[name].shape for name in (*read, *made) if name)
    for name in names:
        shape = infos[name].shape
        for dim in range(len(shape)):
            if not dim or shape[dim - 1] > 1:
                for cuts, runs in _ways(shape[dim:], count, shapes if not dim else ()):
                    yield name, (*(1,) * dim, *cuts), runs


def _ways(shape: Shape, count: int, shapes: Iterable[Shape]) -> Iterator[tuple[Cuts, Runs]]:
    """Yield the cuts of a shape, and those that values of other shapes are cut in."""
    tried = []
    for other in (shape, *shapes):
        found = spread_from(other, count)
        if found is not None:
            parts, runs = math.prod(found[0]), found[1]
            cuts = spread(shape, parts, runs)
            if cuts is not None and (cuts, runs) not in tried:
                tried.append((cuts, runs))
                yield cuts, runs


Run = tuple[int, ...]
_LONGEST = 24  # nodes
_NARROWEST = 16  # values below this fraction of the largest are left alone


def wide_runs(sg: SimplifiedGraph, *, is_exact: bool = False) -> list[tuple[Run, str]]:
    """Return runs of nodes, each with its largest value, the largest first.

    A run that may begin earlier comes before the same run without that beginning. Exact sums over
    all rows need what a beginning makes as a whole, and then what it reads had better be away.
    """
    storages = [s for made in storages_of(sg) for s in made if not s.is_output]
    storages.sort(key=lambda s: (-s.size_bytes, s.producer))
    found: list[tuple[Run, str]] = []
    taken: set[int] = set()
    for storage in storages:
        if storage.size_bytes * _NARROWEST < storages[0].size_bytes:
            break
        grown = _grown(storage, storages)
        run = _without_draws(sg, grown)
        if run and len(run) <= _LONGEST and taken.isdisjoint(run):
            inside = (other for other in storages if other.producer in run)
            wide = next(inside, storage).root
            first = grown[0] if is_exact else _beginning(grown, storages)
            if first < grown[0] and taken.isdisjoint(range(first, grown[0])):
                found.append((_without_draws(sg, tuple(range(first, grown[-1] + 1))), wide))
            found.append((run, wide))
            taken.update(run)
    return found


def _grown(storage: NodeStorage, storages: list[NodeStorage]) -> Run:
    first, last = min(_uses(storage)), max(_uses(storage))
    wide = [s for s in storages if 2 * s.size_bytes > storage.size_bytes]
    while last - first < _LONGEST:
        low, high = first, last
        for other in wide:
            start, *ends = _uses(other)
            if any(first <= use <= last for use in (start, *ends)):  # made or read within the run
                low, high = min(low, start), max(high, start, *ends)
        if (low, high) == (first, last):
            break
        first, last = low, high
    return tuple(range(first, last + 1))


def _beginning(run: Run, storages: list[NodeStorage]) -> int:
    """Return the first of the nodes before a run that make twice what they read, for it alone."""
    first = run[0]
    while first:
        made = [s for s in storages if s.producer == first - 1]
        read = sum(s.size_bytes for s in storages if first - 1 in s.fwd_users)
        ends = [end for s in made for end in (*s.fwd_users, *s.bwd_users)]
        if not ends or max(ends) > run[-1] or sum(s.size_bytes for s in made) < 2 * read:
            break
        first -= 1
    return first


def _without_draws(sg: SimplifiedGraph, run: Run) -> Run:
    """Return a run without what only draws for it, as the mask of a dropout.

    It is drawn for all rows at once, as in eager, and read by rows.
    """
    return tuple(i for i in run if not sg.nodes[i].is_random or sg.nodes[i].deps)


def _uses(storage: NodeStorage) -> tuple[int, ...]:
    """Return the maker of a storage and its readers."""
    return (storage.producer, *storage.fwd_users, *storage.bwd_users)
