"""The graph that is run: with fewer views, and with its backward divided among the nodes.

A view is a geometry on a storage: shape, strides, offset. Two views with the same geometry are
merged (a weight's gradient that is transposed twice), but not in two backwards if a forward makes
the storage, as a plan may drop it between them and make it again. A chain of views of which only
the last is read becomes one call of `as_strided` on the start of the chain. So does a single view,
because that call is the fastest.

External tensors (parameters, inputs, gradients of outputs) may have another offset in their storage
at another step. Two of them that share memory in the recording may not share it then. So views of
them never state an offset, and views of different ones are never merged.

Autograd sums the gradient of a bias with `keepdim=True`, then takes a view without the dimensions
that it has kept. The same kernel can return that view directly, with the same strides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rkgb.elements.op import Op, Ref, renamed
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.backward_slices import Slice
from rkgb.graphs.basic import BasicGraph, HandOver
from rkgb.graphs.simplified import SimplifiedGraph, SimplifiedNode, backward_uses, with_reads
from rkgb.run.graph.overwrite import freeing, overwrite_gradients

_AS_STRIDED = torch.ops.aten.as_strided.default
_AS_FAST = (_AS_STRIDED, torch.ops.aten.t.default)


@dataclass(frozen=True)
class RunnableGraph:
    """A graph to run, and the views of the recorded forward that it leaves out."""

    graph: SimplifiedGraph
    same: Mapping[str, str]  # removed view -> value of the same geometry
    sources: Mapping[str, str]  # removed view in a chain -> the start of the chain

    def with_backward(self, basic: BasicGraph) -> SimplifiedGraph:
        """Return the graph with the backward of another recording of the same forward."""
        return _with_backward(self, basic, self.graph.slices_of(basic))


def runnable(sg: SimplifiedGraph) -> RunnableGraph:
    """Return the graph that is run for `sg`: the same nodes and results, with fewer calls."""
    views = _Views(sg.basic, {}, {}, frozenset(sg.output_names))
    views.note(sg.basic.externals)
    forward = [views.merged(node.ops) for node in sg.nodes]
    reads = (views.current(n) for node in sg.nodes for n in node.read_by_backward)
    uses = Counter(name for part in forward for op in part for name in dict.fromkeys(op.inputs))
    uses.update(reads)
    uses.update(sg.output_names)
    fused = [views.fused(part, uses) for part in forward]
    # A node that would become empty keeps its views, because plans count nodes.
    pairs = zip(sg.nodes, fused, strict=True)
    nodes = [replace(node, ops=tuple(ops) or node.ops) for node, ops in pairs]
    graph = replace(sg, nodes=tuple(nodes))
    bare = RunnableGraph(graph, dict(views.same), dict(views.sources))
    slices = [(node.backward, node.hand_overs) for node in sg.nodes]
    return replace(bare, graph=_with_backward(bare, sg.basic, slices))


def _with_backward(
    runnable_: RunnableGraph, basic: BasicGraph, slices: Sequence[Slice]
) -> SimplifiedGraph:
    sg = runnable_.graph
    views = _Views(basic, dict(runnable_.same), runnable_.sources, frozenset())
    views.note(basic.externals)
    made = {name for node in sg.nodes for op in node.ops for name in op.results if name}
    views.note(name for node in sg.nodes for op in node.ops for name in op.results if name)
    roots = {basic.infos[name].alias_of for name in made if name in basic.infos}
    parts: list[list[Op]] = [[] for _ in slices]
    for index in reversed(range(len(slices))):
        parts[index] = views.merged(views.restored(slices[index][0], made))
        views.forget(parts[index], roots)
    uses = Counter(name for part in parts for op in part for name in dict.fromkeys(op.inputs))
    uses.update(views.current(h.value) for _, give in slices for h in give)
    nodes = []
    for node, part, (_, give) in zip(sg.nodes, parts, slices, strict=True):
        hand_overs = tuple(HandOver(h.leaf, views.current(h.value), h.sequence_nr) for h in give)
        ops = tuple(views.fused(part, uses))
        nodes.append(replace(node, backward=ops, hand_overs=hand_overs))
    nodes, basic = overwrite_gradients(*without_kept_dims(nodes, basic))
    kept = {*sg.output_names, *(name for node in nodes for name in node.read_by_backward)}
    return freeing(replace(sg.with_basic(basic), nodes=with_reads(nodes, kept, basic.infos)))


class _Views:
    def __init__(
        self,
        basic: BasicGraph,
        same: dict[str, str],
        sources: Mapping[str, str],
        returned: frozenset[str],
    ) -> None:
        self.infos, self.same = basic.infos, same
        self.outside = _from_outside(basic)  # value -> the external tensor that it is a view of
        self.returned = returned  # each is a separate tensor with a separate gradient
        self.sources = dict(sources)
        self.first: dict[tuple[object, ...], str] = {}
        self._restored: list[str] = []  # by all backwards so far
        self._stale: set[str] = set()  # by earlier ones only

    def current(self, name: str) -> str:
        return self.same.get(name, name)

    def note(self, names: Iterable[str]) -> None:
        for name in names:
            self.first.setdefault(self._geometry(name), name)

    def restored(self, ops: Iterable[Op], made: set[str]) -> list[Op]:
        """Restore views that the forward leaves out and this backward reads."""
        result: list[Op] = []
        for op in ops:
            for name in op.inputs:
                source = self.sources.get(name)
                if source is None or name in made:
                    continue
                if name not in self.same or name in self._stale:
                    self._restored.append(name)
                    self._stale.discard(name)
                    again = f"{name}_view_{len(self._restored)}"
                    result.append(self._strided(replace(op, name=again, writes=()), again, name))
                    self.same[name] = again
            result.append(op)
        return result

    def forget(self, ops: Iterable[Op], roots: Container[str]) -> None:
        """Forget the views of these storages that a backward makes."""
        self._stale.update(self._restored)
        for op in ops:
            if self._is_view(op) and self.infos[name := op.results[0]].alias_of in roots:
                geometry = self._geometry(name)
                if self.first.get(geometry) == name:
                    del self.first[geometry]

    def _strided(self, op: Op, name: str, like: str) -> Op:
        base = like
        while base in self.sources:
            base = self.sources[base]
        args = self._strided_args(self.current(base), like)
        return replace(
            op, target=_AS_STRIDED, args=args, kwargs={}, results=(name,), returns_many=False
        )

    def _strided_args(self, base: str, like: str) -> tuple[Any, ...]:
        """Return the arguments of `as_strided` that make the view `like` of `base`."""
        info = self.infos[like]
        offset = () if info.offset == self.infos[base].offset else (info.offset,)
        return (Ref(base), info.shape, info.stride, *offset)

    def _can_be_strided(self, base: str, like: str) -> bool:
        """Return whether the view `like` does not depend on the offset of `base` in its storage."""
        return base not in self.outside or self.infos[base].offset == self.infos[like].offset

    def _geometry(self, name: str) -> tuple[object, ...]:
        info = self.infos[name]
        ground = self.outside.get(name, info.alias_of)
        return ground, info.dtype, info.shape, info.stride, info.offset

    def _is_view(self, op: Op) -> bool:
        if op.writes or op.is_random or len(op.results) != 1 or not op.results[0] or not op.inputs:
            return False
        if getattr(op.target, "namespace", "") != "aten" or op.target_name == "_neg_view":
            return False
        made, source = self.infos.get(op.results[0]), self.infos[op.inputs[0]]
        return (
            made is not None
            and len(made.stride) == len(made.shape)  # it is not sparse
            and made.alias_of == source.alias_of
            and made.dtype == source.dtype
            and not made.dtype.is_complex
            and not (op.target is _AS_STRIDED and op.inputs[0] in self.outside)  # states an offset
        )

    def merged(self, ops: Iterable[Op]) -> list[Op]:
        """Leave out views with the same geometry and memory as an earlier value."""
        kept = []
        for op in ops:
            if self._is_view(op) and op.results[0] not in self.returned:
                other = self.first.get(self._geometry(op.results[0]))
                if other is not None:
                    self.same[op.results[0]] = self.current(other)
                    continue
            self.note(name for name in op.results if name in self.infos)
            kept.append(renamed(op, self.current))
        return kept

    def fused(self, ops: Sequence[Op], uses: Counter[str]) -> list[Op]:
        """Leave out views that nobody reads; join a view with its base if it is the only reader."""
        made = {op.results[0]: op for op in ops if self._is_view(op)}
        dropped: set[str] = set()
        kept = []
        for op in reversed(ops):
            name = op.results[0] if op.results else ""
            if name in dropped:
                continue
            if name in made and not uses[name]:
                uses.subtract(dict.fromkeys(op.inputs, 1))
                continue
            if name in made:
                base = op.inputs[0]
                while base in made and uses[base] == 1 and self._can_be_strided(base, name):
                    if not self._can_be_strided(made[base].inputs[0], base):
                        break
                    dropped.add(base)
                    self.sources[base] = made[base].inputs[0]
                    base = made[base].inputs[0]
                if self._can_be_strided(base, name) and (
                    base != op.inputs[0] or op.target not in _AS_FAST
                ):
                    op = replace(
                        op,
                        target=_AS_STRIDED,
                        args=self._strided_args(base, name),
                        kwargs={},
                        returns_many=False,  # one of `unbind` or `split`, as their only part
                    )
            kept.append(op)
        return kept[::-1]


def _from_outside(basic: BasicGraph) -> dict[str, str]:
    """Return for each view of an external tensor that tensor."""
    infos = basic.infos
    grounds = {name: name for name in (*basic.externals, *filter(None, basic.tangent_names))}
    for op in (*basic.ops, *basic.backward):
        for name in op.results:
            if name and infos[name].alias_of != name:
                seen = [n for n in op.inputs if infos[n].alias_of == infos[name].alias_of]
                if seen and seen[0] in grounds:
                    grounds[name] = grounds[seen[0]]
    return grounds


_SUM = torch.ops.aten.sum.dim_IntList


def without_kept_dims(
    nodes: Sequence[SimplifiedNode], basic: BasicGraph
) -> tuple[list[SimplifiedNode], BasicGraph]:
    """Return the nodes with sums that drop dimensions directly, and the updated recording."""
    infos = basic.infos
    now: dict[str, str] = {}  # storage of a removed sum -> its replacement
    readers = backward_uses(nodes, infos).readers
    changed = []
    for node in nodes:
        sums = {op.results[0]: op for op in node.backward if op.target is _SUM}
        views = {
            base: op
            for op in node.backward
            if (base := op.inputs[0] if op.inputs else "") in sums
            and len(readers[base]) == 1
            and _drops_dims(sums[base], op, infos)
        }
        gone = {op.name for op in views.values()}
        backward = []
        for op in node.backward:
            if op.target is _SUM and (view := views.get(op.results[0])) is not None:
                now[op.results[0]] = view.results[0]
                op = replace(op, args=op.args[:2], results=view.results)
            if op.name not in gone:
                backward.append(op)
        changed.append(replace(node, backward=tuple(backward)))
    changed_infos = {
        name: replace(info, alias_of=now[info.alias_of])
        if info.alias_of in now and name not in now
        else info
        for name, info in infos.items()
    }
    return changed, replace(basic, infos=changed_infos)


def _drops_dims(sum_: Op, view: Op, infos: Mapping[str, TensorInfo]) -> bool:
    """Return whether a view of a sum is all of it, without the summed dimensions."""
    if len(sum_.args) < 3 or sum_.args[2] is not True or len(view.results) != 1 or view.writes:
        return False
    kept, seen = infos[sum_.results[0]], infos[view.results[0]]
    if not sum_.args[1] or not kept.shape:  # no dimensions: a sum over all
        return False
    summed = {dim % len(kept.shape) for dim in sum_.args[1]}
    left = [dim for dim in range(len(kept.shape)) if dim not in summed]
    return (
        kept.alias_of == sum_.results[0] == seen.alias_of
        and seen.dtype == kept.dtype
        and seen.offset == kept.offset
        and seen.shape == tuple(kept.shape[dim] for dim in left)
        and seen.stride == tuple(kept.stride[dim] for dim in left)
    )
