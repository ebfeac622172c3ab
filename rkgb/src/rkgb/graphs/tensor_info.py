"""Static facts about one tensor of the graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape, type and layout of a value, and the value whose storage it shares.

    `alias_of` names the value that made the storage; it equals the value's own name when the
    storage is its own. `size_bytes` is the size of the tensor's elements, `storage_bytes` that of
    its storage.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    requires_grad: bool
    alias_of: str
    size_bytes: int
    storage_bytes: int
    offset: int = 0  # of the first element in the storage, in elements

    @classmethod
    def of(cls, tensor: Tensor, alias_of: str, storage_bytes: int) -> TensorInfo:
        """Return the facts about a tensor whose storage is `alias_of`'s."""
        return cls(
            tuple(tensor.shape),
            tensor.dtype,
            tensor.stride(),
            False,
            alias_of,
            tensor.numel() * tensor.element_size(),
            storage_bytes,
            int(tensor.storage_offset()),
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
