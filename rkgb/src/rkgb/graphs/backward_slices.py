"""Cut a recorded backward into one part per node of the forward.

Every operation of the backward carries the number of the autograd node that it ran for, and so
belongs to the forward operation that made that node. A part may need what a later part makes only
if they are one: an operation belongs at least to the node of whatever depends on it. Reordering
within these limits changes no bit, since sums of gradients are operations of their own.

A sum of two gradients runs as soon as both are there, as autograd itself does: it was recorded for
the node that its result goes to, and until then the gradients of every use of a value would wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rkgb.elements.cut import Cut, Part
from rkgb.elements.op import Op
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.basic import BasicGraph, HandOver

Slice = tuple[tuple[Op, ...], tuple[HandOver, ...]]


def slice_backward(basic: BasicGraph, count: int, node_of: Mapping[int, int]) -> list[Slice]:
    """Return the part of each of `count` nodes; `node_of` maps forward operations to nodes.

    What leads to no gradient of a leaf, nor of an output, is left out.
    """
    kept = _needed(basic)
    ops = [basic.backward[index] for index in kept]
    owner: dict[int, int] = {}  # sequence number -> node
    for index, op in enumerate(basic.ops):
        if index in node_of:
            owner.setdefault(op.sequence_nr, node_of[index])
    home = {n: node for i, node in node_of.items() for n in basic.ops[i].results if n}

    def least(name: str) -> int:
        """Return the first node whose backward may read a value.

        Memory that a forward makes is read by no backward of an earlier node, by whatever name: a
        backward that scales it in place gives it a new one.
        """
        return max(home.get(name, 0), home.get(basic.infos[name].alias_of, 0))

    labels = [owner.get(op.sequence_nr, 0) for op in ops]
    followers = _followers(basic.infos, ops)
    for index in reversed(range(len(ops))):
        reads = map(least, ops[index].inputs)
        labels[index] = max([labels[index], *reads, *(labels[j] for j in followers[index])])
    _sum_early(basic.infos, ops, labels, followers, home)
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
        # Autograd adds the parts of one leaf in the order in which they come.
        latest[hand_over.leaf] = min(made, latest.get(hand_over.leaf, made))
        gives[latest[hand_over.leaf]].append(hand_over)
    return [(tuple(part), tuple(give)) for part, give in zip(parts, gives, strict=True)]


def is_gradient_sum(op: Op) -> bool:
    """Whether an operation is how autograd adds two gradients of one value."""
    return op.target is torch.ops.aten.add.Tensor and len(op.inputs) == 2 and not op.kwargs


def _sum_early(
    infos: Mapping[str, TensorInfo],
    ops: Sequence[Op],
    labels: list[int],
    followers: Sequence[Sequence[int]],
    home: Mapping[str, int],
) -> None:
    """Move sums, and the views that they look through, to the part that makes the last term."""
    before: list[list[int]] = [[] for _ in ops]
    for index, later in enumerate(followers):
        for other in later:
            before[other].append(index)

    def is_view(op: Op) -> bool:
        roots = {infos[name].alias_of for name in op.inputs}
        return not op.writes and {infos[name].alias_of for name in op.results if name} <= roots

    def raised(index: int) -> list[int]:
        """Return the views that would move along, and last the operation itself."""
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


def _needed(basic: BasicGraph) -> list[int]:
    """Return the operations that a gradient of a leaf or of an output depends on."""
    infos = basic.infos
    needed = {hand_over.value for hand_over in basic.hand_overs}
    roots = {infos[name].alias_of for name in needed}
    kept = []
    for index in reversed(range(len(basic.backward))):
        op = basic.backward[index]
        writes = any(infos[name].alias_of in roots for name in op.writes)
        if (
            writes
            or op.is_random
            or isinstance(op.target, (Cut, Part))
            or not needed.isdisjoint(op.results)
        ):
            kept.append(index)
            needed.update(op.inputs)
            roots.update(infos[name].alias_of for name in (*op.inputs, *op.results) if name)
    return kept[::-1]


def _followers(infos: Mapping[str, TensorInfo], ops: Sequence[Op]) -> list[list[int]]:
    """Return, for each operation, those that must run after it."""
    followers: list[list[int]] = [[] for _ in ops]
    producer: dict[str, int] = {}
    touched: dict[str, list[int]] = {}  # storage -> who read or wrote it since its last write
    last_write: dict[str, int] = {}
    last_random: int | None = None
    for index, op in enumerate(ops):
        before = {producer[name] for name in op.inputs if name in producer}
        storages = {infos[name].alias_of for name in (*op.inputs, *op.results) if name}
        before.update(last_write[s] for s in storages if s in last_write)
        for storage in {infos[name].alias_of for name in op.writes}:
            before.update(touched.get(storage, ()))
            last_write[storage] = index
            touched[storage] = []
        if op.is_random:
            before.update([] if last_random is None else [last_random])
            last_random = index
        for storage in storages:
            touched.setdefault(storage, []).append(index)
        producer.update(dict.fromkeys(op.results, index))
        for other in before - {index}:
            followers[other].append(index)
    return followers


def order_of(
    parts: Sequence[Sequence[Op]], infos: Mapping[str, TensorInfo]
) -> list[tuple[int, ...]]:
    """Return, for each part, the parts that must run before it, in their reverse order."""
    ops = [op for part in reversed(parts) for op in part]
    place = [len(parts) - 1 - i for i, part in enumerate(reversed(parts)) for _ in part]
    before: list[dict[int, None]] = [{} for _ in parts]
    for index, later in enumerate(_followers(infos, ops)):
        for other in later:
            if place[other] != place[index]:
                before[place[other]][place[index]] = None
    return [tuple(found) for found in before]
