"""Put parts that run piece by piece into a simplified graph, each as one node."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rkgb.elements.op import Op, Ref, map_refs
from rkgb.elements.tensor_info import TensorInfo
from rkgb.errors import NotByPiecesError
from rkgb.graphs.basic import BasicGraph
from rkgb.graphs.dataflow import DataFlowGraph
from rkgb.graphs.passes import PLANNED_PASSES
from rkgb.graphs.simplified import D_to_S, SimplifiedGraph, SimplifiedNode, merging
from rkgb.rows.call import InPieces
from rkgb.rows.cuts import EVEN, Cuts, Runs, Shape, spread, spread_from
from rkgb.rows.losses import Scaled, counted, one_like
from rkgb.rows.parts import parts_that_leave
from rkgb.rows.pieces import Cutting, Pieces, SameBits
from rkgb.rows.regions import Run, wide_runs

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


Rows = tuple[str, Cuts, Runs]  # an input, and how it is cut


@dataclass(frozen=True)
class CutNode:
    """A node that runs piece by piece."""

    index: int
    count: int
    module_path: str
    name: str  # of the operations
    rows: Rows  # what is cut first
    makes_gradients: bool = False  # of a loss, along with the forward

    def __str__(self) -> str:
        where = self.module_path or "(root)"
        how = "each computed again in the backward"
        if self.makes_gradients:
            how = "each with its gradients, which the backward scales"
        rest = "" if self.rows[2] == EVEN else ", the last with fewer"
        return f"{self.name} ({where}): {self.count} pieces of rows{rest}, {how}"


@dataclass(frozen=True)
class CutGraph:
    """A graph in which some nodes run piece by piece."""

    graph: SimplifiedGraph
    merged: SimplifiedGraph  # the same nodes, as recorded
    nodes: tuple[CutNode, ...]
    how: Cut
    refused: tuple[str, ...] = field(default=())  # runs that stay whole, and why

    def with_backward(
        self, basic: BasicGraph, same_bits: SameBits | None = None
    ) -> SimplifiedGraph:
        """Return the same cuts with the backward of another recording of the same forward.

        Raises:
            NotByPiecesError: it reads values that this forward does not keep.
        """
        merged = self.merged.with_backward(basic)
        cut = [_Node(merged, n.index, n.rows, same_bits) for n in self.nodes]
        return _with_cut(merged, {node.index: node.replaced() for node in cut}, cut)


def cut_in_rows(dg: DataFlowGraph, how: Cut, same_bits: SameBits | None = None) -> CutGraph:
    """Return the planned graph of `dg` with its largest parts in pieces of rows.

    For exact pieces `same_bits` is the test of operations.
    """
    plain = D_to_S(dg, passes=PLANNED_PASSES)
    why: list[str] = []

    def can_be_cut(run: Sequence[int], wide: str) -> bool:
        try:
            merged, index = _merged(dg, plain, run)
            _first_cut(merged, index, how.count, wide, same_bits)
        except NotByPiecesError as error:
            main = plain.nodes[run[0]]
            why.append(f"{main.module_path or '(root)'} ({main.name}): {error}")
            return False
        return True

    runs: list[tuple[Run, str]] = []
    taken: set[int] = set()
    for run, wide in wide_runs(plain):
        if len(runs) != how.most and taken.isdisjoint(run) and can_be_cut(run, wide):
            runs.append((run, wide))
            taken.update(run)
    runs += [
        ((index,), "") for index in how.alone if index not in taken and can_be_cut((index,), "")
    ]
    merged = D_to_S(dg, passes=(*PLANNED_PASSES, merging(plain, [run for run, _ in runs])))
    nodes: dict[int, SimplifiedNode] = {}
    cut, made = [], []
    try:
        for chosen, wide in runs:
            index = _home(merged, plain, chosen)
            node, own, nodes[index] = _first_cut(merged, index, how.count, wide, same_bits)
            cut.append(node)
            made.append(own)
    except NotByPiecesError as error:  # each can be cut alone, but not all together
        _log.debug("only the widest part is cut: %s", error)
        return cut_in_rows(dg, replace(how, most=1, alone=()), same_bits)
    return CutGraph(_with_cut(merged, nodes, made), merged, tuple(cut), how, tuple(why))


def _with_cut(
    merged: SimplifiedGraph, nodes: Mapping[int, SimplifiedNode], cut: Sequence[_Node]
) -> SimplifiedGraph:
    """Return a graph with these nodes in the place of its own, and the values that they add."""
    basic = merged.basic
    infos = dict(basic.infos)
    for node in cut:
        infos.update(node.added)
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
    sg: SimplifiedGraph, index: int, count: int, wide: str, same_bits: SameBits | None
) -> tuple[CutNode, _Node, SimplifiedNode]:
    """Cut a node along the first rows for which every operation has a rule.

    Raises:
        NotByPiecesError: there are no such rows.
    """
    node = sg.nodes[index]
    why = "nothing comes in that has rows"
    for rows in _rows(sg, node, count):
        try:
            own = _Node(sg, index, rows, same_bits)
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


class _Node:
    def __init__(
        self, sg: SimplifiedGraph, index: int, rows: Rows, same_bits: SameBits | None
    ) -> None:
        name, cuts, self.runs = rows
        self.sg, self.count, self.index = sg, math.prod(cuts), index
        self.node, self.infos = sg.nodes[index], sg.infos
        self.forward = self._cutting(self.infos, {name: cuts}, same_bits)
        for op in self.node.ops:
            self.forward.add(op)
        self.made = {name for op in self.node.ops for name in op.results if name}
        self.makes_gradients = False
        # Values that the recording does not have, or not in memory of their own.
        self.added: dict[str, TensorInfo] = {}

    def _cutting(
        self, infos: Mapping[str, TensorInfo], seeds: Mapping[str, Cuts], same_bits: SameBits | None
    ) -> Cutting:
        return Cutting(infos, self.count, seeds, self.runs, same_bits)

    def replaced(self, wide: str = "") -> SimplifiedNode:
        """Return the node with a forward and a backward of one call each.

        Raises:
            NotByPiecesError: an operation has no rule for these cuts, or `wide` is not cut.
        """
        if wide and self.forward.cut.get(wide) is None:
            raise NotByPiecesError(f"{wide} is made as a whole")
        if self.forward.same_bits is None and self.node.backward:
            with suppress(NotByPiecesError):
                return self._with_gradients()
        backward, views_back, behind = self._backward()
        leaving = [name for name in self._left_to_others() if name in self.made]
        leaving += [name for name in behind if name in self.made]
        roots, views = self._roots(leaving, self.node.ops)
        pieces = replace(self.forward.pieces(roots), recorded=self._counted(self.forward, roots))
        main = self.node.main
        ops = (self._call(pieces, "forward", main), *views)
        if backward is None:
            return replace(self.node, name=self._name(), ops=ops)
        call = self._call(backward, "backward", self.node.backward[0])
        return replace(self.node, name=self._name(), ops=ops, backward=(call, *views_back))

    def _with_gradients(self) -> SimplifiedNode:
        """Return a loss whose forward makes its gradients, which the backward scales.

        Raises:
            NotByPiecesError: it is no loss, or a gradient depends on a sum over pieces.
        """
        node, infos = self.node, self.infos
        own, outside = self._made_behind(), {*self.sg.basic.externals}
        read = dict.fromkeys(name for op in node.backward for name in op.inputs)
        theirs = [n for n in read if n not in own and n not in self.made and n not in outside]
        arrived = [n for n in theirs if self.sg.producer.get(n, self.index) >= self.index]
        if (
            len(arrived) != 1
            or infos[arrived[0]].shape
            or not infos[arrived[0]].dtype.is_floating_point
        ):
            raise NotByPiecesError("its backward begins with more than one number")
        (tangent,), dtype = arrived, infos[arrived[0]].dtype
        roots, views = self._roots(self._left_by_backward(own), node.backward)
        units = {root: f"{root}_of_one" for root in roots}
        one = one_like(tangent, next(iter(self.forward.seeds)), dtype)
        before, instead = [one], {tangent: one.name, **units}
        for total, counts in counted(node.ops, infos):
            before += counts
            instead[total] = counts[-1].name
        own_infos = {new: replace(infos[old], alias_of=new) for old, new in instead.items()}
        cutting = self._cutting({**infos, **own_infos}, self.forward.seeds, None)
        cutting.before += before
        for op in node.ops:
            cutting.add(op)
        for op in node.backward:
            args = map_refs(op.args, lambda name: Ref(instead.get(name, name)))
            results = tuple(instead.get(name, name) for name in op.results)
            cutting.add(replace(op, args=args, results=results))
        behind = [name for op in views for name in op.inputs]
        behind += [h.value for h in node.hand_overs]
        leaving = [*self._left_to_others(), *(name for name in behind if name in self.made)]
        ours, own_views = self._roots(leaving, node.ops)
        made = (*ours, *units.values())
        pieces = replace(cutting.pieces(made), recorded=(*node.ops, *node.backward))
        written = self._written()
        if any(infos[name].alias_of in written for name in pieces.takes):
            raise NotByPiecesError("what it reads is written to")
        self.added = {unit: own_infos[unit] for unit in units.values()}
        self.makes_gradients = True
        first = node.backward[0]
        scaled = Op(
            name=roots[0],
            target=Scaled(),
            args=(Ref(tangent), *map(Ref, units.values())),
            kwargs={},
            results=roots,
            returns_many=True,
            module_path=first.module_path or node.module_path,
            source=first.source,
            sequence_nr=first.sequence_nr,
        )
        call = self._call(pieces, "forward with gradients", node.main)
        ops = (call, *own_views)
        return replace(node, name=self._name(), ops=ops, backward=(scaled, *views))

    def _name(self) -> str:
        return f"{self.node.name} in {self.count} pieces"

    def _backward(self) -> tuple[Pieces | None, tuple[Op, ...], list[str]]:
        """Return the backward in pieces, the views of its results, and its inputs."""
        node, ops = self.node, self.node.backward
        if not ops:
            return None, (), [h.value for h in node.hand_overs]
        own = self._made_behind()
        leaving, same_bits = self._left_by_backward(own), self.forward.same_bits
        if same_bits is None:
            self.added = parts_that_leave(leaving, ops, self.sg.basic)
        roots, views = self._roots([n for n in leaving if n not in self.added], ops)
        roots = (*roots, *self.added)
        seeds = self._gradients(own)
        cutting = self._cutting({**self.infos, **self.added}, seeds, same_bits)
        cutting.known = self.forward.late
        for op in (*node.ops, *ops):
            cutting.add(op)
        pieces = cutting.pieces(roots)
        written = self._written()
        for name in pieces.takes:
            if self.infos[name].alias_of in written:
                raise NotByPiecesError(f"{name} is written to, and the backward reads it again")
            if name in self.forward.cut:
                raise NotByPiecesError(f"the backward reads all of {name}")
        pieces = replace(pieces, recorded=self._counted(cutting, roots))
        read = [*pieces.takes, *(name for op in views for name in op.inputs)]
        read += [h.value for h in node.hand_overs]
        return pieces, views, read

    def _made_behind(self) -> set[str]:
        return {name for op in self.node.backward for name in op.results if name}

    def _left_by_backward(self, own: set[str]) -> list[str]:
        """Return the values of the backward that others read or autograd gets."""
        leaving = [h.value for h in self.node.hand_overs if h.value in own]
        for index, other in enumerate(self.sg.nodes):
            if index != self.index:
                leaving += [name for name in other.read_by_backward if name in own]
        return leaving

    def _written(self) -> set[str]:
        """Return the storages that the step writes to after the node has read them."""
        basic = self.sg.basic
        before = {place for node in self.sg.nodes[: self.index] for place in node.positions}
        later = range(min(self.node.positions), len(basic.ops))
        ops = (*(basic.ops[n] for n in later if n not in before), *basic.backward)
        return {self.infos[n].alias_of for op in ops for n in op.writes} | {*basic.written_roots}

    def _gradients(self, own: set[str]) -> dict[str, Cuts]:
        """Return the cuts of incoming gradients: those of a result of the same shape."""
        shapes: dict[tuple[int, ...], Cuts] = {}
        for name in self._left_to_others():
            if name in self.forward.cut:
                shapes.setdefault(self.infos[name].shape, self.forward.cut[name])
        seeds = dict(self.forward.seeds)
        outside = {*self.sg.basic.externals}
        for op in self.node.backward:
            for name in op.inputs:
                shape = self.infos[name].shape
                is_theirs = name in own or name in self.made or name in self.sg.producer
                if not is_theirs and name not in outside and shape in shapes:
                    seeds[name] = shapes[shape]
        return seeds

    def _left_to_others(self) -> list[str]:
        """Return the values of the forward that other nodes or the user read."""
        names = [out for out in self.sg.output_names if out in self.made]
        names += [out.name for out in self.sg.outputs if isinstance(out, Ref)]
        for index, other in enumerate(self.sg.nodes):
            if index != self.index:
                names += [*other.inputs, *other.read_by_backward]
        return [name for name in dict.fromkeys(names) if name in self.made]

    def _roots(
        self, leaving: Sequence[str], ops: Sequence[Op]
    ) -> tuple[tuple[str, ...], tuple[Op, ...]]:
        """Return the results of a call, and the views of them that stay separate operations."""
        maker = {name: op for op in ops for name in op.results if name}
        roots: dict[str, None] = {}
        views: set[int] = set()
        todo = list(leaving)
        while todo:
            name = todo.pop()
            op = maker.get(name)
            if op is None:
                continue
            if self.infos[name].alias_of == name:
                roots[name] = None
            else:
                views.add(id(op))
                todo += op.inputs
        kept = tuple(op for op in ops if id(op) in views)
        return tuple(name for name in maker if name in roots), kept

    def _counted(self, cutting: Cutting, roots: Sequence[str]) -> tuple[Op, ...]:
        """Return the recorded operations that a call runs."""
        needed, kept = set(roots), []
        for op in reversed(cutting.added):
            if not needed.isdisjoint(op.results) and not {*op.results} <= {*cutting.known}:
                kept.append(op)
                needed.update(op.inputs)
        return tuple(reversed(kept))

    def _call(self, pieces: Pieces, side: str, like: Op) -> Op:
        return Op(
            name=pieces.results[0] if pieces.results else f"{like.name}_in_pieces",
            target=InPieces(pieces, self.node.main.target_name, side),
            args=tuple(map(Ref, pieces.takes)),
            kwargs={},
            results=pieces.results,
            returns_many=True,
            module_path=like.module_path or self.node.module_path,
            source=like.source,
            sequence_nr=like.sequence_nr,
        )
