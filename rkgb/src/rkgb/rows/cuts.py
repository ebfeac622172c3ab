"""How a tensor is cut: the number of parts along each dimension. All pieces have one size.

    cuts (4, 2, 1) of shape (4, 6, 5): 8 pieces of shape (1, 3, 5), the last cut running fastest

So a tensor with dimensions for batch and length is cut like its flattened rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

Cuts = tuple[int, ...]
Shape = tuple[int, ...]


def piece_shape(shape: Sequence[int], cuts: Cuts) -> Shape:
    """Return the shape of one piece."""
    return tuple(size // parts for size, parts in zip(shape, cuts, strict=True))


def piece_of(tensor: Tensor, cuts: Cuts, index: int) -> Tensor:
    """Return one piece of a tensor, as a view."""
    for dim in range(len(cuts) - 1, -1, -1):
        if cuts[dim] > 1:
            index, at = divmod(index, cuts[dim])
            length = tensor.shape[dim] // cuts[dim]
            tensor = tensor.narrow(dim, at * length, length)
    return tensor


def spread(shape: Sequence[int], count: int) -> Cuts | None:
    """Return the cuts into `count` runs of consecutive rows, or None if the sizes do not divide."""
    cuts = []
    for size in shape:
        if size and count % size == 0:
            cuts.append(size)
            count //= size
        elif size % count == 0:
            cuts.append(count)
            count = 1
        else:
            return None
    return tuple(cuts) if count == 1 else None


def spread_from(shape: Sequence[int], dim: int, count: int) -> Cuts | None:
    """Return the cuts along a dimension and the ones after it, into at least `count` runs.

    It is the smallest number that divides the rows; None if that is not below `2 * count`.
    """
    for parts in range(count, 2 * count):
        found = spread(shape[dim:], parts)
        if found is not None:
            return (*(1,) * dim, *found)
    return None


def reshaped(shape: Sequence[int], cuts: Cuts, new: Sequence[int]) -> Cuts | None:
    """Return the cuts of a reshaped tensor, or None if its pieces are no boxes in the new shape."""
    found: list[int] = []
    at = 0
    for own, others in _groups(shape, new):
        parts = _consecutive(shape[at : at + own], cuts[at : at + own])
        at += own
        there = None if parts is None else spread(new[len(found) : len(found) + others], parts)
        if there is None:
            return None
        found += there
    return tuple(found)


def _consecutive(shape: Sequence[int], cuts: Cuts) -> int | None:
    """Return the number of runs of consecutive rows, or None if the pieces are no such runs."""
    within = False  # inside a dimension in which a piece has more than one row
    for size, parts in zip(shape, cuts, strict=True):
        if within and parts > 1:
            return None
        within = within or parts < size
    return math.prod(cuts)


def _groups(shape: Sequence[int], new: Sequence[int]) -> list[tuple[int, int]]:
    """Return (count, new count) of dimensions that a reshape turns into each other, in order."""
    found = []
    i = j = 0
    while i < len(shape) or j < len(new):
        left, right = i, j
        a = b = 1
        while True:
            if i == left or (a < b and i < len(shape)):
                a *= shape[i] if i < len(shape) else 1
                i = min(i + 1, len(shape))
            if (j == right or b < a) and j < len(new):
                b *= new[j]
                j += 1
            if a == b or (i == len(shape) and j == len(new)):
                break
        found.append((i - left, j - right))
    return found
