"""Saved tensors that stay in the caller's table: autograd holds a handle, and asks when it reads.

What a piece saves is found out at its first recording: which saved tensors are (views of) values of
the table, by name and geometry. Later recordings hand out the same handles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Shape, strides, offset, type, and whether it is read as its conjugate or its negative.
Geometry = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, bool, bool]


class SavedView(NamedTuple):
    """Handle of a saved tensor that is (a view of) a value of the table."""

    name: str
    geometry: Geometry | None  # None: it is the value itself


@dataclass(frozen=True, slots=True)
class SavingHooks:
    """Hooks for saved tensors, made once a step: they put handles in, and take values out."""

    plan: list[Iterator[SavedView | None]]  # one iterator: what the piece being recorded saves
    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]

    @classmethod
    def of(cls, values: Mapping[str, Tensor]) -> SavingHooks:
        """Return hooks for the table `values`, which they refer to."""
        plan: list[Iterator[SavedView | None]] = [iter(())]

        def pack(tensor: Tensor) -> Any:
            handle = next(plan[0])
            if handle is None:
                return tensor.detach() if tensor.requires_grad else tensor
            return handle

        def unpack(handle: Any) -> Tensor:
            if isinstance(handle, Tensor):
                return handle
            name, geometry = handle
            return values[name] if geometry is None else strided(values[name], geometry)

        return cls(plan, pack, unpack)


@dataclass(slots=True)
class SeenTensor:
    """A tensor that a first recording saved; `view` is set when the table turns out to own it."""

    tensor: Tensor | None
    version: int
    view: SavedView | None = None


def looking_hooks(
    values: Mapping[str, Tensor], seen: list[SeenTensor]
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return the hooks of a first recording: what is saved goes into `seen`, to be classified."""

    def pack(tensor: Tensor) -> Any:
        seen.append(SeenTensor(tensor.detach(), tensor._version))
        return seen[-1]

    def unpack(handle: Any) -> Tensor:
        held: SeenTensor = handle
        if held.view is None:
            assert held.tensor is not None
            return held.tensor
        name, geometry = held.view
        return values[name] if geometry is None else strided(values[name], geometry)

    return pack, unpack


def geometry_of(tensor: Tensor) -> Geometry:
    return (
        *(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())),
        *(tensor.dtype, tensor.is_conj(), tensor.is_neg()),
    )


def strided(base: Tensor, geometry: Geometry) -> Tensor:
    shape, stride, offset, dtype, conj, neg = geometry
    if dtype == base.dtype and not (conj or neg or base.is_conj() or base.is_neg()):
        return base.as_strided(shape, stride, offset)
    view = torch.empty(0, dtype=dtype, device=base.device)
    view = view.set_(base.untyped_storage(), offset, shape, stride)
    view = view.conj() if conj else view
    return torch._neg_view(view) if neg else view
