"""Overlap of tensors in memory, by addresses."""

from __future__ import annotations

from torch import Tensor

from rkgb.elements.spread import memory_of


def apart(tensor: Tensor, taken: list[tuple[int, int]]) -> Tensor:
    """Return a gradient in separate memory, because it may be written while others are read.

    Addresses are compared instead of storages: once Python has accessed the storage of a gradient,
    autograd no longer adds to it in place.
    """
    start, end = span(tensor)
    if any(start < other_end and other_start < end for other_start, other_end in taken):
        tensor = tensor.clone()
    taken.append(span(tensor))
    return tensor


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the range of addresses of a tensor's elements; of a sparse one, of its values."""
    tensor = tensor._values() if tensor.is_sparse else tensor
    tensor = memory_of(tensor)
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()
