"""Fold equal neighbouring layers into one, so that pictures of deep networks stay small.

A picture is a row of cells, each with its module path. Cells are split into layers at the numbers
in their paths ('blocks.0', 'blocks.1', …). If a pattern of layers repeats, only its first copy is
drawn.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

_MAX_PERIOD = 32
_FEW = 3


@dataclass(frozen=True, slots=True)
class Placed:
    """Where one cell is drawn: as the cell `shown`, inside these repeats (outermost first)."""

    shown: int
    copies: tuple[tuple[int, int], ...] = ()  # (number of the repeat, index of the copy)


@dataclass(frozen=True)
class Repeat:
    """A pattern that is drawn once in place of `count` copies."""

    count: int
    label: str
    cells: frozenset[int]  # the drawn ones


@dataclass(frozen=True)
class Folding:
    """The place of every cell, and the repeats, outermost before innermost."""

    places: tuple[Placed, ...]
    repeats: tuple[Repeat, ...]

    @property
    def shown(self) -> tuple[int, ...]:
        """The cells that are drawn, in order."""
        return tuple(dict.fromkeys(place.shown for place in self.places))

    def edge(self, source: int, target: int) -> tuple[int, int] | None:
        """Return the drawn cells of an edge, or None between two copies of one pattern."""
        a, b = self.places[source], self.places[target]
        for (repeat, copy), (other, other_copy) in zip(a.copies, b.copies, strict=False):
            if repeat != other:
                break
            if copy != other_copy:
                return None
        return a.shown, b.shown


def fold(paths: Sequence[str], signatures: Sequence[Hashable]) -> Folding:
    """Return how to draw the cells; `signatures` are equal for cells that look alike."""
    folder = _Folder(paths, signatures)
    folder.visit(list(range(len(paths))), 1)
    return Folding(tuple(folder.places[i] for i in range(len(paths))), tuple(folder.repeats))


def layer_of(path: str, depth: int = 1) -> str | None:
    """Return the path up to its `depth`-th number: 'blocks.0' of 'blocks.0.mlp.2' for depth 1."""
    parts = path.split(".")
    seen = 0
    for place, part in enumerate(parts):
        seen += part.isdigit()
        if seen == depth:
            return ".".join(parts[: place + 1])
    return None


class _Folder:
    def __init__(self, paths: Sequence[str], signatures: Sequence[Hashable]) -> None:
        self.paths = paths
        self.signatures = signatures
        self.places = [Placed(i) for i in range(len(paths))]
        self.repeats: list[Repeat] = []

    def visit(self, cells: list[int], depth: int) -> None:
        segments = list(self._segments(cells, depth))
        keys = [self._key(segment, depth) for segment in segments]
        start = 0
        while start < len(segments):
            period, count = _longest_run(keys, start)
            if count > 1 and self._worth(segments[start], segments[start + period], count):
                copies = [
                    [c for s in segments[start + k * period : start + (k + 1) * period] for c in s]
                    for k in range(count)
                ]
                self._fold(copies, depth)
                start += period * count
            else:
                self._deeper(segments[start], depth)
                start += 1

    def _worth(self, first: list[int], second: list[int], count: int) -> bool:
        # A few equal calls inside one module (query, key, value) say more when drawn out. Folded
        # are layers, the steps of a loop, and the blocks of a chain, which have no path.
        inside = self.paths[first[0]] and self.paths[first[0]] == self.paths[second[0]]
        return not inside or count > _FEW

    def _deeper(self, cells: list[int], depth: int) -> None:
        if any(layer_of(self.paths[cell], depth + 1) for cell in cells) and len(cells) > 1:
            self.visit(cells, depth + 1)

    def _fold(self, copies: list[list[int]], depth: int) -> None:
        number = len(self.repeats)
        first = copies[0]
        label = _label([self.paths[c] for c in first], [self.paths[c] for c in copies[-1]])
        self.repeats.append(Repeat(len(copies), label, frozenset()))
        around = [len(self.places[cell].copies) for cell in first]
        self._deeper(first, depth)
        models = [self.places[cell] for cell in first]
        for which, copy in enumerate(copies):
            for model, outside, cell in zip(models, around, copy, strict=True):
                before, inside = model.copies[:outside], model.copies[outside:]
                self.places[cell] = Placed(model.shown, (*before, (number, which), *inside))
        drawn = frozenset(model.shown for model in models)
        self.repeats[number] = Repeat(len(copies), label, drawn)

    def _segments(self, cells: list[int], depth: int) -> Iterator[list[int]]:
        for layer, group in itertools.groupby(cells, lambda c: layer_of(self.paths[c], depth)):
            if layer is None:
                yield from ([cell] for cell in group)
            else:
                yield list(group)

    def _key(self, segment: list[int], depth: int) -> Hashable:
        key = []
        for cell in segment:
            layer = layer_of(self.paths[cell], depth)
            rest = self.paths[cell] if layer is None else self.paths[cell][len(layer) :]
            # Layers of different lists ('encoder.0', 'decoder.0') never form one pattern.
            parent = "" if layer is None else layer.rpartition(".")[0]
            key.append((parent, rest, self.signatures[cell]))
        return tuple(key)


def _longest_run(keys: Sequence[Hashable], start: int) -> tuple[int, int]:
    """Return (period, copies) of the repetition at `start` that covers the most cells."""
    best = (1, 1)
    for period in range(1, min(_MAX_PERIOD, (len(keys) - start) // 2) + 1):
        pattern = keys[start : start + period]
        count = 1
        while keys[start + count * period : start + (count + 1) * period] == pattern:
            count += 1
        if count > 1 and period * count > best[0] * best[1]:
            best = (period, count)
    return best


def _label(first: Sequence[str], last: Sequence[str]) -> str:
    """Return 'blocks.0 … blocks.11' from the paths of the first and the last copy."""
    for a, b in zip(first, last, strict=True):
        if a == b:
            continue
        parts, others = a.split("."), b.split(".")
        place = next(i for i, (x, y) in enumerate(zip(parts, others, strict=False)) if x != y)
        return f"{'.'.join(parts[: place + 1])} … {'.'.join(others[: place + 1])}"
    return re.sub(r"\.$", "", first[0]) if first else ""
