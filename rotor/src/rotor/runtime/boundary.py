"""Values between stages: a tensor, or a tuple or list (nested or named) of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Tensors: TypeAlias = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """How tensors are arranged in a value: `kind` None is a tensor, else a sequence of layouts."""

    kind: type | None
    children: tuple[Layout, ...] = ()

    @property
    def count(self) -> int:
        """The number of tensors."""
        return 1 if self.kind is None else sum(child.count for child in self.children)


TENSOR = Layout(None)


def pack(value: Any) -> tuple[Tensors, Layout]:
    """Return the tensors of a value in order, and their layout for `unpack`.

    Raises:
        TypeError: the value contains something other than tensors.
    """
    if isinstance(value, torch.Tensor):
        return (value,), TENSOR
    if not isinstance(value, tuple | list):
        raise TypeError(f"{type(value).__name__}")
    tensors: list[torch.Tensor] = []
    children = []
    for part in value:
        inner, layout = pack(part)
        tensors += inner
        children.append(layout)
    return tuple(tensors), Layout(type(value), tuple(children))


def unpack(tensors: Tensors, layout: Layout) -> Any:
    """Return the value that `pack` took apart."""
    if layout.kind is None:
        return tensors[0]
    parts = []
    for child in layout.children:
        parts.append(unpack(tensors[: child.count], child))
        tensors = tensors[child.count :]
    if hasattr(layout.kind, "_fields"):  # a named tuple takes its parts one by one
        return layout.kind(*parts)
    return layout.kind(parts)


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Return whether tensors of this dtype can have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def versions(tensors: Tensors) -> tuple[int, ...]:
    """Return the version counter of each tensor: how often torch saw its memory written to."""
    return tuple(-1 if t.is_inference() else t._version for t in tensors)
