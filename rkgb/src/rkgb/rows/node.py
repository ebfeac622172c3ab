"""One node of a graph with a forward and a backward of one call each, which run piece by piece."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from rkgb.elements.op import Op, Ref, call_like, map_refs
from rkgb.elements.tensor_info import TensorInfo
from rkgb.errors import NotByPiecesError
from rkgb.graphs.simplified import SimplifiedGraph, SimplifiedNode
from rkgb.rows.call import InPieces
from rkgb.rows.channels import Channels
from rkgb.rows.cuts import Cuts, Runs, reshaped
from rkgb.rows.losses import Scaled, counted, direct, one_like
from rkgb.rows.memory import parts_that_leave
from rkgb.rows.pieces import Cutting, Pieces
from rkgb.rows.same_bits import BitsOfPieces

Rows = tuple[str, Cuts, Runs]  # an input, and how it is cut


class NodeInPieces:
    """A node of a graph, cut along rows of one of its inputs."""

    def __init__(
        self,
        sg: SimplifiedGraph,
        index: int,
        rows: Rows,
        same_bits: BitsOfPieces | None,
        *,
        is_compiled: bool = False,
    ) -> None:
        name, cuts, self.runs = rows
        self.is_compiled = is_compiled
        self.sg, self.count, self.index = sg, math.prod(cuts), index
        self.node, self.infos = sg.nodes[index], sg.infos
        self.made = {name for op in self.node.ops for name in op.results if name}
        self.makes_gradients = False
        # Values that the recording does not have, or not in memory of their own.
        self.added: dict[str, TensorInfo] = {}
        self.inner: dict[str, TensorInfo] = {}  # the same, within a call
        self.joined: set[str] = set()
        ops = self._by_channels(self.node.ops, self.infos, self._left_to_others(), same_bits)
        self.forward = self._cutting(self.infos, self._seen_alike(name, cuts), same_bits)
        for op in ops:
            self.forward.add(op)

    def _seen_alike(self, name: str, cuts: Cuts) -> dict[str, Cuts]:
        """Return an input and other views of all of it, as two products read, with their cuts."""
        infos, first = self.infos, self.infos[name]
        read = dict.fromkeys(n for op in self.node.ops for n in op.inputs if n not in self.made)
        seeds = {name: cuts}
        for other, info in ((n, infos[n]) for n in read):
            alike = info.alias_of == first.alias_of and info.size_bytes == first.size_bytes
            if alike and info.is_dense and first.is_dense and info.offset == first.offset:
                own = reshaped(first.shape, cuts, info.shape, self.runs)
                if own is not None and other != name:
                    seeds[other] = own
        return seeds

    def _cutting(
        self,
        infos: Mapping[str, TensorInfo],
        seeds: Mapping[str, Cuts],
        same_bits: BitsOfPieces | None,
    ) -> Cutting:
        return Cutting(
            *({**infos, **self.inner}, self.count, seeds, self.runs, same_bits),
            joined=self.joined,
            is_compiled=self.is_compiled,
        )

    def _by_channels(
        self,
        ops: Sequence[Op],
        infos: Mapping[str, TensorInfo],
        left: Collection[str],
        same_bits: BitsOfPieces | None,
    ) -> list[Op]:
        """Return operations with convolutions in parts."""
        channels = Channels(ops, infos, left, same_bits.of_series if same_bits else None)
        parts = [*channels.in_parts()]
        self.inner.update(channels.added)
        self.joined |= channels.joined
        return parts

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
        calls = [self._call(pieces, "backward", self._first_of_backward()) for pieces in backward]
        return replace(self.node, name=self._name(), ops=ops, backward=(*calls, *views_back))

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
        recorded = [*node.ops]
        for op in node.backward:
            args = map_refs(op.args, lambda name: Ref(instead.get(name, name)))
            results = tuple(instead.get(name, name) for name in op.results)
            recorded.append(replace(op, args=args, results=results))
        left = {*self._left_to_others(), *units.values()}
        if not self.is_compiled:  # compiled code makes them in one pass from what is recorded
            recorded, found = direct(recorded, {**infos, **own_infos}, left)
            own_infos |= found
            self.inner.update(found)
        parts = self._by_channels(recorded, {**infos, **own_infos}, left, None)
        cutting = self._cutting({**infos, **own_infos}, self.forward.seeds, None)
        cutting.before += before
        for op in parts:
            cutting.add(op)
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
        scaled = call_like(self._first_of_backward(), Scaled(), (tangent, *units.values()), roots)
        call = self._call(pieces, "forward with gradients", node.main)
        ops = (call, *own_views)
        return replace(node, name=self._name(), ops=ops, backward=(scaled, *views))

    def _name(self) -> str:
        return f"{self.node.name} in {self.count} pieces"

    def _backward(self) -> tuple[list[Pieces], tuple[Op, ...], list[str]]:
        """Return the calls of the backward, the views of its results, and its inputs."""
        node, ops = self.node, self.node.backward
        if not ops:
            return [], (), [h.value for h in node.hand_overs]
        own = self._made_behind()
        leaving, same_bits = self._left_by_backward(own), self.forward.same_bits
        self.added = parts_that_leave(leaving, ops, self.sg.basic)
        roots, views = self._roots([n for n in leaving if n not in self.added], ops)
        left = {*self._left_to_others(), *roots}
        roots = (*roots, *self.added)
        parts = self._by_channels((*node.ops, *ops), self.infos, left, same_bits)
        seeds = self._gradients(own)
        cutting = self._cutting({**self.infos, **self.added}, seeds, same_bits)
        cutting.known = self.forward.late
        for op in parts:
            cutting.add(op)
        calls = [
            replace(pieces, recorded=self._counted(cutting, pieces.results))
            for pieces in self._calls(cutting, roots)
        ]
        written = self._written()
        for name in (name for pieces in calls for name in pieces.takes):
            if self.infos[name].alias_of in written:
                raise NotByPiecesError(f"{name} is written to, and the backward reads it again")
            if name in self.forward.cut:
                raise NotByPiecesError(f"the backward reads all of {name}")
        read = [name for pieces in calls for name in pieces.takes]
        read += [name for op in views for name in op.inputs]
        read += [h.value for h in node.hand_overs]
        return calls, views, read

    def _calls(self, cutting: Cutting, roots: Sequence[str]) -> list[Pieces]:
        """Return the calls that make the results.

        An exact sum over all rows of what is there as a whole is made before other results are.
        """
        sums = [root for root in roots if cutting.same_bits and root in cutting.late]
        first = [root for root in sums if not cutting.pieces([root]).gathered]
        each = first, [root for root in roots if root not in first]
        return [cutting.pieces(names) for names in each if names]

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

    def _first_of_backward(self) -> Op:
        """Return the first operation of the backward, in the node's submodule."""
        first = self.node.backward[0]
        return replace(first, module_path=first.module_path or self.node.module_path)

    def _call(self, pieces: Pieces, side: str, like: Op) -> Op:
        target = InPieces(pieces, self.node.main.target_name, side)
        return call_like(like, target, pieces.takes, pieces.results)
