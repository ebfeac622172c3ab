"""Static facts about one tensor of the graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape, type and layout of a value, and the value whose storage it shares.

    `alias_of` names the value that made the storage; it equals the value's own name when the
    storage is its own. `size_bytes` is the size of the tensor's elements, not of its storage.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    requires_grad: bool
    alias_of: str
    size_bytes: int

    @classmethod
    def of(cls, tensor: Tensor, *, requires_grad: bool, alias_of: str) -> TensorInfo:
        return cls(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            stride=tuple(tensor.stride()),
            requires_grad=requires_grad,
            alias_of=alias_of,
            size_bytes=tensor.numel() * tensor.element_size(),
        )

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        grad = " grad" if self.requires_grad else ""
        return f"{kind}[{', '.join(map(str, self.shape))}]{grad}"


def storage_id(tensor: Tensor) -> int:
    """Return a number that two tensors share exactly when they share their memory.

    Valid only while both are alive: a freed storage's number is used again.
    """
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensor: Tensor) -> int:
    """Return the bytes that the tensor's storage occupies (more than its elements for a slice)."""
    return int(tensor.untyped_storage().nbytes())
