"""How the numbers of pieces depend on one size: the length of texts, or the number of samples.

Pieces of one form differ only in numbers. A rule says what each number is at another size. It is
fitted to two pieces, and holds for a further piece only if its numbers agree.

rule = SizeRule.fitted((8, 256, 2048), (8, 200, 1600))
rule.numbers(100)               # [8, 100, 800]
rule.size_of((8, 100, 800))     # 100
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MOST_BASES = 8  # numbers to try as the size


@dataclass(frozen=True, slots=True)
class Term:
    """`square * n * n + factor * n + constant` for a size n."""

    square: int = 0
    factor: int = 0
    constant: int = 0

    def at(self, size: Any) -> Any:
        """Return the number at a size, which may be a symbol."""
        value = self.constant
        if self.factor:
            value = value + self.factor * size
        return value + self.square * size * size if self.square else value

    @classmethod
    def fitted(cls, sizes: tuple[int, int], numbers: tuple[int, int]) -> Term | None:
        """Return the simplest term with these numbers at these two different sizes, or None."""
        if numbers[0] == numbers[1]:
            return cls(constant=numbers[0])
        factor, rest = divmod(numbers[1] - numbers[0], sizes[1] - sizes[0])
        if not rest and numbers[0] == factor * sizes[0]:
            return cls(factor=factor)
        square = numbers[0] // sizes[0] ** 2
        if all(number == square * size**2 for size, number in zip(sizes, numbers, strict=True)):
            return cls(square=square)
        if rest or factor < 0:
            return None
        return cls(factor=factor, constant=numbers[0] - factor * sizes[0])


@dataclass(frozen=True, slots=True)
class SizeRule:
    """The numbers of a piece as functions of its size, which is one of them."""

    terms: tuple[Term, ...]
    place: int

    def numbers(self, size: Any) -> list[Any]:
        """Return the numbers at a size, which may be a symbol."""
        return [term.at(size) for term in self.terms]

    def size_of(self, numbers: Sequence[int]) -> int | None:
        """Return the size at which a piece has these numbers, or None."""
        size = numbers[self.place]
        return size if self.numbers(size) == list(numbers) else None

    @classmethod
    def fitted(cls, before: Sequence[int], now: Sequence[int]) -> SizeRule | None:
        """Return the rule with the fewest constants, or None if one size does not explain all."""
        pairs = list(zip(before, now, strict=True))
        bases = sorted({pair for pair in pairs if pair[0] != pair[1] and min(pair) > 1})
        best: tuple[int, SizeRule] | None = None
        for base in bases[:_MOST_BASES]:
            terms = [Term.fitted(base, pair) for pair in pairs]
            found = tuple(term for term in terms if term is not None)
            if len(found) < len(terms):
                continue
            odd = sum(bool(term.constant and term.factor) for term in found)
            if best is None or odd < best[0]:
                best = odd, cls(found, pairs.index(base))
        return None if best is None else best[1]
