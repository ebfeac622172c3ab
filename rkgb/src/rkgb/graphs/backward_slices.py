"""Cut a recorded backward into one part per node of the forward.

Every operation of the backward carries the number of its autograd node, and so belongs to the
forward operation that made that node. Parts run from the last node to the first, so an operation
moves to a later node if one of its readers is there. Reordering within these limits changes no bit,
because sums of gradients are separate operations.

A sum of two gradients runs as soon as both exist, as in autograd. It was recorded under the node
that gets the result; if it ran there, the gradients of all uses of a value would wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rkgb.elements.op import Op
from rkgb.elements.target import ThroughAutograd
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.basic import BasicGraph, HandOver
from rkgb.graphs.uses import before_each, live_ops, roots_of

Slice = tuple[tuple[Op, ...], tuple[HandOver, ...]]


def slice_backward(basic: BasicGraph, count: int, node_of: Mapping[int, int]) -> list[Slice]:
    """Return the part of each of `count` nodes; `node_of` maps forward operations to nodes.

    Operations that lead to no gradient of a leaf or an output are left out.
    """
    given = [hand_over.value for hand_over in basic.hand_overs]
    kept = live_ops(basic.infos, basic.backward, given, _stays)
    ops = [basic.backward[index] for index in kept]
    owner: dict[int, int] = {}  # sequence number -> node
    for index, op in enumerate(basic.ops):
        if index in node_of:
            owner.setdefault(op.sequence_nr, node_of[index])
    home = {n: node for i, node in node_of.items() for n in basic.ops[i].results if n}

    def least(name: str) -> int:
        """Return the first node whose backward may read a value.

        No backward of an earlier node reads memory that a forward makes. This includes its other
        names: a backward that scales it in place gives it a new name.
        """
        return max(home.get(name, 0), home.get(basic.infos[name].alias_of, 0))

    labels = [owner.get(op.sequence_nr, 0) for op in ops]
    before = [sorted(data | order) for data, order in before_each(basic.infos, ops)]
    for index in reversed(range(len(ops))):
        labels[index] = max([labels[index], *map(least, ops[index].inputs)])
        for other in before[index]:
            labels[other] = max(labels[other], labels[index])
    _sum_early(basic.infos, ops, labels, before, home)
    parts: list[list[Op]] = [[] for _ in range(count)]
    maker: dict[str, int] = {}
    for op, label in zip(ops, labels, strict=True):
        parts[label].append(op)
        maker.update(dict.fromkeys(op.results, label))
    gives: list[list[HandOver]] = [[] for _ in range(count)]
    latest: dict[str, int] = {}
    for hand_over in basic.hand_overs:
        made = maker.get(hand_over.value, owner.get(hand_over.sequence_nr, 0))
        made = max(made, least(hand_over.value))
        # Autograd adds the parts of a leaf's gradient in the order of their arrival.
        latest[hand_over.leaf] = min(made, latest.get(hand_over.leaf, made))
        gives[latest[hand_over.leaf]].append(hand_over)
    return [(tuple(part), tuple(give)) for part, give in zip(parts, gives, strict=True)]


def _stays(op: Op) -> bool:
    return op.is_random or isinstance(op.target, ThroughAutograd)


def is_gradient_sum(op: Op) -> bool:
    """Return whether an operation is autograd's sum of two gradients of one value."""
    return op.target is torch.ops.aten.add.Tensor and len(op.inputs) == 2 and not op.kwargs


def _sum_early(
    infos: Mapping[str, TensorInfo],
    ops: Sequence[Op],
    labels: list[int],
    before: Sequence[Sequence[int]],
    home: Mapping[str, int],
) -> None:
    """Move sums of gradients, with views of their terms, to the part that makes the last term."""

    def is_view(op: Op) -> bool:
        return not op.writes and roots_of(infos, op.results) <= roots_of(infos, op.inputs)

    def raised(index: int) -> list[int]:
        """Return the views that have to move along, then the operation itself."""
        views = [j for j in before[index] if is_view(ops[j]) and before[j]]
        return [*(k for j in views for k in raised(j)), index]

    for index, op in enumerate(ops):
        if not is_gradient_sum(op):
            continue
        group = raised(index)
        if any(name in home for j in group for name in ops[j].inputs):
            continue
        terms = [labels[j] for k in group for j in before[k] if j not in group]
        if terms:
            for j in group:
                labels[j] = max(labels[j], min(terms))


def order_of(
    parts: Sequence[Sequence[Op]], infos: Mapping[str, TensorInfo]
) -> list[tuple[int, ...]]:
    """Return for each part the parts that must run before it, the last node first."""
    ops = [op for part in reversed(parts) for op in part]
    place = [len(parts) - 1 - i for i, part in enumerate(reversed(parts)) for _ in part]
    found: list[set[int]] = [set() for _ in parts]
    for here, before in zip(place, before_each(infos, ops), strict=True):
        found[here].update(place[other] for other in (*before.data, *before.order))
    return [tuple(sorted(others - {here}, reverse=True)) for here, others in enumerate(found)]
