"""Gradients that an opaque call makes in several parts, added part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rkgb.elements.op import Op, Ref
from rkgb.opaque.piece import RunPieceBackward

_ADDS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


class AddParts:
    """`total + part` for each part, as autograd adds gradients when they arrive."""

    def __init__(self, *, in_place: bool) -> None:
        self.in_place = in_place
        self.__name__ = "add_parts_" if in_place else "add_parts"

    def __repr__(self) -> str:
        return self.__name__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AddParts) and other.in_place == self.in_place

    def __hash__(self) -> int:
        return hash((AddParts, self.in_place))

    def __call__(self, total: Tensor, parts: Tensor | Sequence[Tensor]) -> Tensor:
        for part in [parts] if isinstance(parts, Tensor) else parts:
            total = total.add_(part) if self.in_place else total + part
        return total


def add_in_parts(backward: Sequence[Op]) -> list[Op]:
    """Return the backward in which the parts of an opaque call's gradients are added as in
    autograd.

    Autograd does not sum the parts first: it adds each one to the gradient from elsewhere.
    """
    readers: dict[str, list[int]] = {}
    for index, op in enumerate(backward):
        for name in op.inputs:
            readers.setdefault(name, []).append(index)
    changed = list(backward)
    for index, op in enumerate(backward):
        if not isinstance(op.target, RunPieceBackward):
            continue
        in_parts = set()
        wanted = [i for i, wants in enumerate(op.target.piece.call.wanting) if wants]
        for place, name in zip(wanted, op.results, strict=False):
            reading = readers.get(name, [])
            if not name or len(reading) != 1:
                continue
            add = backward[reading[0]]
            if add.target in _ADDS and add.sequence_nr == op.sequence_nr and len(add.args) == 2:
                first, second = add.args
                if second == Ref(name) and first != second:
                    in_place = add.target is torch.ops.aten.add_.Tensor
                    changed[reading[0]] = replace(add, target=AddParts(in_place=in_place))
                    in_parts.add(place)
        if in_parts:
            target = RunPieceBackward(op.target.piece, frozenset(in_parts))
            changed[index] = replace(op, target=target)
    return changed
