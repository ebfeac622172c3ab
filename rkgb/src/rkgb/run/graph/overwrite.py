"""In-place reuse: gradients are computed in the memory of a gradient after its last use.

Autograd adds and scales gradients into new tensors, because something else may still hold the old
ones. In a program with fixed steps the last use of every gradient is known, so the result can
overwrite it. The kernel and its numbers are the same, and one tensor less is alive at the moment at
which a backward often peaks.

The gradient of a part (`x[0]`) is the gradient of the whole with zeros elsewhere. If it is added to
another gradient, only the part is added. So queries, keys and values that are parts of one tensor
take its size once instead of three times.

By donation, a call frees arguments that nobody else reads, after their last use inside. When the
backward of a node begins, the program drops gradients and saved tensors that nothing reads later,
under every plan. Compiled code and opaque calls take them in a list that they empty, and free each
one after its last use inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rkgb.elements.op import Op, Ref
from rkgb.elements.target import ThroughAutograd, target_of
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.basic import BasicGraph
from rkgb.graphs.simplified import SimplifiedGraph, SimplifiedNode, backward_uses
from rkgb.graphs.uses import At, roots_of
from rkgb.run.graph.node_storages import dying_in_backward, storages_of

_aten = torch.ops.aten

# Elementwise kernels. A sum or product may overwrite either operand...
_IN_PLACE: Mapping[Any, Callable[..., Any]] = {
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.mul.Tensor: _aten.mul_.Tensor,
}
# ...and the backward of an activation may overwrite the incoming gradient.
INTO_GRADIENT: Mapping[Any, Callable[..., Any]] = {
    getattr(_aten, name).default: getattr(_aten, name).grad_input
    for name in (
        *("threshold_backward", "gelu_backward", "silu_backward", "tanh_backward"),
        *("sigmoid_backward", "leaky_relu_backward", "hardtanh_backward"),
    )
}


def overwrite_gradients(
    nodes: Sequence[SimplifiedNode], basic: BasicGraph
) -> tuple[list[SimplifiedNode], BasicGraph]:
    """Return the nodes with in-place operations in their backwards, and the updated recording."""
    rewriting = _Rewriting(nodes, basic.infos)
    parts = {}
    for index in reversed(range(len(nodes))):
        ops = nodes[index].backward
        rewritten = [rewriting.rewritten(op, At(index, place)) for place, op in enumerate(ops)]
        parts[index] = tuple(op for op in rewritten if op.name not in rewriting.folded)
    changed = [replace(node, backward=parts[index]) for index, node in enumerate(nodes)]
    infos = {
        name: replace(info, alias_of=rewriting.root(info.alias_of))
        if info.alias_of in rewriting.into
        else info
        for name, info in basic.infos.items()
    }
    return changed, replace(basic, infos=infos)


def made_by_backward(nodes: Sequence[SimplifiedNode], infos: Mapping[str, TensorInfo]) -> set[str]:
    """Return the storages that the backward makes and may overwrite."""
    own = {n for node in nodes for op in node.backward for n in op.results if n}
    own = {name for name in own if infos[name].alias_of == name}
    for node in nodes:  # the owner of a leaf may read its gradient at any time
        own -= roots_of(infos, (hand_over.value for hand_over in node.hand_overs))
        for op in node.backward:
            if isinstance(op.target, ThroughAutograd):  # hooks may keep it
                own -= roots_of(infos, (*op.inputs, op.name))
            elif target_of(op).runs_python:  # and so may those inside of an opaque call
                own -= roots_of(infos, op.inputs)
    return own


class _Rewriting:
    def __init__(self, nodes: Sequence[SimplifiedNode], infos: Mapping[str, TensorInfo]) -> None:
        self.nodes, self.infos = nodes, infos
        self.uses = backward_uses(nodes, infos)
        self.into: dict[str, str] = {}  # removed storage -> the one it lies in
        self.own = made_by_backward(nodes, infos)
        self.folded: set[str] = set()  # operations whose result is never made

    def root(self, storage: str) -> str:
        """Return the storage in which a recorded storage lies now."""
        while storage in self.into:
            storage = self.into[storage]
        return storage

    def rewritten(self, op: Op, at: At) -> Op:
        """Return the operation, in place if possible."""
        first = op.inputs[0] if op.inputs else ""
        if op.target in _IN_PLACE and len(op.args) == 2 and len(set(op.inputs)) == 2:
            for term, other in (op.inputs, op.inputs[::-1]):
                if not op.kwargs and self._can_hold(term, op, at):
                    self._overwrite(term, op)
                    maker = self._part(op, other, at)
                    if maker is not None:
                        self.folded.add(maker.name)
                        added = (Ref(term), *maker.args)
                        return replace(op, target=ADD_SELECTED, args=added, writes=(term,))
                    target, args = _IN_PLACE[op.target], (Ref(term), Ref(other))
                    return replace(op, target=target, args=args, writes=(term,))
        elif (
            op.target in INTO_GRADIENT
            and op.args[0] == Ref(first)
            and self._can_hold(first, op, at)
        ):
            self._overwrite(first, op)
            kwargs = {**op.kwargs, "grad_input": Ref(first)}
            return replace(op, target=INTO_GRADIENT[op.target], kwargs=kwargs, writes=(first,))
        return op

    def _part(self, op: Op, name: str, at: At) -> Op | None:
        """Return the operation that puts zeros around a part, if only this sum reads its result."""
        is_alone = name in self.own and len(self.uses.reads[name]) == 1
        if op.target is not _aten.add.Tensor or not is_alone:
            return None
        before = self.nodes[at.part].backward[: at.place]
        for place, maker in enumerate(before):
            if name in maker.results and maker.target is SELECTED and not maker.kwargs:
                part = self.infos[maker.inputs[0]].alias_of
                written = roots_of(self.infos, (n for o in before[place:] for n in o.writes))
                return None if part in written else maker
        return None

    def _overwrite(self, term: str, op: Op) -> None:
        self.into[op.results[0]] = self.infos[term].alias_of

    def _can_hold(self, term: str, op: Op, at: At) -> bool:
        """Return whether the result may overwrite a term, which no other argument overlaps."""
        result, info = self.infos[op.results[0]], self.infos[term]
        others = [self.infos[name] for name in op.inputs if name != term]
        return (
            result.alias_of == op.results[0]
            and result.dtype.is_floating_point  # complex ones may be conjugated views
            and (info.shape, info.stride, info.dtype, info.offset)
            == (result.shape, result.stride, result.dtype, 0)
            and info.storage_bytes == result.storage_bytes == info.size_bytes
            and all((o.shape, o.dtype) == (result.shape, result.dtype) for o in others)
            and info.alias_of in self.own
            and self.uses.last[info.alias_of] == at
            and self.root(info.alias_of) not in {self.root(o.alias_of) for o in others}
        )


SELECTED = torch.ops.aten.select_backward.default  # puts zeros around a part


class AddSelected:
    """`whole += select_backward(part, sizes, dim, index)`."""

    __name__ = "add_selected_"

    def __repr__(self) -> str:  # the same in every process: a key of recorded costs
        return "rkgb.add_selected_"

    def __call__(
        self, whole: Tensor, part: Tensor, sizes: Sequence[int], dim: int, index: int
    ) -> Tensor:
        dim %= len(sizes)
        length, index = sizes[dim], index % sizes[dim]
        whole.select(dim, index).add_(part)
        for first, count in ((0, index), (index + 1, length - index - 1)):
            if count:
                whole.narrow(dim, first, count).add_(0.0)
        return whole


ADD_SELECTED = AddSelected()


def freeing(sg: SimplifiedGraph) -> SimplifiedGraph:
    """Return the graph in which backwards of several kernels take donated arguments."""
    if not any(target_of(op).run for node in sg.nodes for op in node.backward):
        return sg
    infos, home, last = sg.infos, sg.producer, sg.uses_behind.last
    outside = set(sg.basic.externals)
    dying = dying_in_backward(storages_of(sg))
    tangents = filter(None, sg.basic.tangent_names)
    # Autograd holds those of losses to the end.
    held = {name for name in tangents if not infos[name].shape}
    made_behind = made_by_backward(sg.nodes, infos)

    def frees(op: Op, at: At) -> Op:
        target = target_of(op)
        if target.run is None:
            return op
        made = roots_of(infos, op.results)
        given = [infos[name].alias_of for name in op.inputs]
        places, own = [], []
        for place, name in enumerate(op.inputs):
            root = infos[name].alias_of
            is_gradient = root not in home and root not in outside
            ends = last[root] == at and root not in made and root not in held
            if ends and (is_gradient or root in dying[at.part]):
                places.append(place)
                if root in made_behind and given.count(root) == 1:
                    own.append(place)
        return replace(op, target=target.freeing(frozenset(places), frozenset(own)))

    nodes = tuple(
        replace(
            node, backward=tuple(frees(op, At(index, at)) for at, op in enumerate(node.backward))
        )
        for index, node in enumerate(sg.nodes)
    )
    return replace(sg, nodes=nodes)
