"""How a tensor is cut: the number of parts along each dimension.

    cuts (4, 2, 1) of shape (4, 6, 5): 8 pieces of shape (1, 3, 5), the last cut running fastest

So a tensor with dimensions for batch and length is cut like its flattened rows. Where no number of
parts divides the rows, the last part is shorter (`Runs`):

    cuts (2, 3) of shape (2, 8) in Runs(8, 3): 3 + 3 + 2 rows, twice; flattened, (6,) of shape (16,)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

Cuts = tuple[int, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """Pieces of a whole value, which have a name of their own in a loop over pieces."""

    source: str
    cuts: Cuts


@dataclass(frozen=True, slots=True)
class Runs:
    """So many parts of so many rows, of which the last is shorter, over and over.

    It holds for the last dimension that is cut, where a row stands for `rows / size` of them.
    """

    size: int = 1
    parts: int = 1

    @property
    def length(self) -> int:
        return -(-self.size // self.parts)

    def is_short(self, index: int) -> bool:
        """Return whether a piece is shorter than others."""
        return self.parts > 1 and index % self.parts == self.parts - 1

    def divide(self, size: int, parts: int) -> bool:
        """Return whether these rows can be cut like this."""
        times, rest = divmod(parts, self.parts)
        return not rest and size % (times * self.size) == 0

    def within(self, size: int, parts: int, index: int) -> tuple[int, int]:
        """Return the first row of a piece, and its number of rows."""
        one = size // (parts // self.parts * self.size)
        times, at = divmod(index, self.parts)
        start = at * self.length
        length = min(self.length, self.size - start)
        return (times * self.size + start) * one, length * one


EVEN = Runs()


def fit(shape: Sequence[int], cuts: Cuts, runs: Runs) -> bool:
    """Return whether a shape can be cut like this."""
    last = _last(cuts)
    pairs = enumerate(zip(shape, cuts, strict=True))
    return all((runs if dim == last else EVEN).divide(*pair) for dim, pair in pairs)


def piece_shape(shape: Sequence[int], cuts: Cuts, runs: Runs = EVEN, index: int = 0) -> Shape:
    """Return the shape of a piece."""
    found = list(shape)
    for dim, _, length in _box(shape, cuts, runs, index):
        found[dim] = length
    return tuple(found)


def piece_of(tensor: Tensor, cuts: Cuts, index: int, runs: Runs = EVEN) -> Tensor:
    """Return one piece of a tensor, as a view."""
    for dim, start, length in _box(tensor.shape, cuts, runs, index):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _box(
    shape: Sequence[int], cuts: Cuts, runs: Runs, index: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the dimensions that are cut, each with the first row of a piece and its length."""
    for dim in range(len(cuts) - 1, -1, -1):
        if cuts[dim] > 1:
            index, at = divmod(index, cuts[dim])
            yield dim, *runs.within(shape[dim], cuts[dim], at)
            runs = EVEN


def _last(cuts: Cuts) -> int:
    """Return the last dimension that is cut, or -1."""
    return max((dim for dim, parts in enumerate(cuts) if parts > 1), default=-1)


def spread(shape: Sequence[int], count: int, runs: Runs = EVEN) -> Cuts | None:
    """Return the cuts into `count` runs of consecutive rows, or None if the sizes do not divide."""
    cuts = []
    for size in shape:
        if count == 1:
            cuts.append(1)
        elif size and count % size == 0 and count // size % runs.parts == 0:
            cuts.append(size)
            count //= size
        elif runs.divide(size, count):
            cuts.append(count)
            count, runs = 1, EVEN
        else:
            return None
    return tuple(cuts) if count == runs.parts == 1 else None


def spread_from(shape: Sequence[int], count: int) -> tuple[Cuts, Runs] | None:
    """Return the cuts into at least `count` runs of consecutive rows.

    It is the smallest number below `2 * count` that divides the rows, or else about `count` runs
    of which the last is shorter; None if there are not so many rows.
    """
    if 0 in shape:
        return None
    for parts in range(count, 2 * count):
        found = spread(shape, parts)
        if found is not None:
            return found, EVEN
    times = 1
    for size in shape:
        if times * size >= count:
            length = -(-size // -(-count // times))
            runs = Runs(size, -(-size // length))
            found = spread(shape, times * runs.parts, runs)
            return None if found is None else (found, runs)
        times *= size
    return None


def reshaped(
    shape: Sequence[int], cuts: Cuts, new: Sequence[int], runs: Runs = EVEN
) -> Cuts | None:
    """Return the cuts of a reshaped tensor, or None if its pieces are no boxes in the new shape."""
    if 0 in shape:
        return None
    found: list[int] = []
    at, last = 0, _last(cuts)
    for own, others in _groups(shape, new):
        parts = _consecutive(shape[at : at + own], cuts[at : at + own])
        theirs = new[len(found) : len(found) + others]
        own_runs = runs if at <= last < at + own else EVEN
        at += own
        there = None if parts is None else spread(theirs, parts, own_runs)
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
