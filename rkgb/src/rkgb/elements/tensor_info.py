"""Static facts about one tensor of the graph."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rkgb.elements.spread import memory_of


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape, type and layout of a value, and the value whose storage it shares.

    `alias_of` names the value that made the storage; it is the value's own name if the storage is
    its own. `size_bytes` is the size of the tensor's elements, `storage_bytes` that of its storage.
    For a distributed tensor both are those of the local part. A sparse tensor has no strides; its
    storage is that of its values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    requires_grad: bool
    alias_of: str
    size_bytes: int
    storage_bytes: int
    offset: int = 0  # of the first element in the storage, in elements
    is_on_host: bool = False  # beside a step on CUDA: no part of the memory that a budget is about
    is_conj: bool = False  # a lazily conjugated view: some kernels copy it first

    @classmethod
    def of(
        cls, tensor: Tensor, alias_of: str, storage_bytes: int, *, is_on_host: bool = False
    ) -> TensorInfo:
        """Return the facts about a tensor whose storage is `alias_of`'s."""
        is_strided = tensor.layout is torch.strided
        return cls(
            tuple(tensor.shape),
            tensor.dtype,
            tensor.stride() if is_strided else (),
            False,
            alias_of,
            _element_bytes(tensor) if is_strided else storage_bytes,
            storage_bytes,
            int(tensor.storage_offset()) if is_strided else 0,
            is_on_host,
            tensor.is_conj(),
        )

    @property
    def counted_bytes(self) -> int:
        """Bytes of the storage in the memory that a budget is about."""
        return 0 if self.is_on_host else self.storage_bytes

    @property
    def is_dense(self) -> bool:
        """Whether the elements lie without gaps and overlaps: a copy then has the same strides."""
        if len(self.stride) != len(self.shape):
            return False
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1 and stride != expected:
                return False
            expected *= max(size, 1)
        return True

    def empty(self, device: torch.device | str) -> Tensor:
        """Return new memory for such a value alone."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        grad = " grad" if self.requires_grad else ""
        return f"{kind}[{', '.join(map(str, self.shape))}]{grad}"


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of elements that lie in order, the last dimension running fastest."""
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


def _element_bytes(tensor: Tensor) -> int:
    own = memory_of(tensor)
    return own.numel() * own.element_size()


def named_apart(pairs: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors by name, each once.

    A tensor may come with several names, of which the last one counts, and a name with several
    tensors, which are numbered then.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in {id(tensor): (name, tensor) for name, tensor in pairs}.values():
        own, numbers = name, itertools.count(2)
        while own in found:
            own = f"{name} ({next(numbers)})"
        found[own] = tensor
    return found


def storage_id(tensor: Tensor) -> int:
    """Return a number that is equal for two tensors exactly if they share their memory.

    It holds only while both are alive: the number of a freed storage is used again.
    """
    return int(storage_of(tensor)._cdata)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, or of the values of a sparse one.

    Raises:
        NotImplementedError: the layout is neither strided nor sparse.
    """
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    return memory_of(tensor).untyped_storage()


def storage_bytes(tensor: Tensor) -> int:
    """Return the bytes that the tensor's storage occupies (more than its elements for a slice)."""
    return int(memory_of(tensor).untyped_storage().nbytes())


def same_values(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one shape have equal elements; NaN equals NaN."""
    if first.dtype.itemsize == 1:  # floating numbers of eight bits are not compared by torch
        first, second = first.view(torch.uint8), second.view(torch.uint8)
    if torch.equal(first, second):
        return True
    return bool(((first == second) | ((first != first) & (second != second))).all())


def same_bits(a: Any, b: Any) -> bool:
    """Whether two results are equal: type, shape and every element; NaN equals NaN."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b or (type(a) is type(b) and bool(a == b))
    return a.dtype == b.dtype and a.shape == b.shape and same_values(a, b)
