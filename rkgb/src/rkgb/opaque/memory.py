"""Where tensors lie in memory, found by addresses."""

from __future__ import annotations

from torch import Tensor

from rkgb.elements.spread import memory_of


def apart(tensor: Tensor, taken: list[tuple[int, int]]) -> Tensor:
    """Return a gradient in memory of its own: it may be written to while others are read.

    Found by addresses: autograd does not add into the memory of a gradient whose storage Python
    has looked at.
    """
    start, end = span(tensor)
    if any(start < other_end and other_start < end for other_start, other_end in taken):
        tensor = tensor.clone()
    taken.append(span(tensor))
    return tensor


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses between which the elements of a tensor lie: of a sparse one, values."""
    tensor = tensor._values() if tensor.is_sparse else tensor
    tensor = memory_of(tensor)
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()
