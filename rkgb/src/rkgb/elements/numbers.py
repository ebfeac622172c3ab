"""Unspecialised numbers: numbers of a call, and Python's arithmetic on them before torch gets them.

A step recorded with a scale of 0.5 also serves a scale of 0.3: only scalars of operations differ,
as long as Python takes the same branches. A tape says how each scalar follows from the arguments of
a call. The outcomes of Python's comparisons are its guards.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv")},
    **{name: getattr(operator, name) for name in ("mod", "pow", "neg", "pos", "abs")},
}
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
}

# Kinds of tape entries that are numbers of the call, with their types.
LEAVES: dict[str, type] = {"float leaf": float, "int leaf": int}


class _Unspecialised:
    """A scalar argument whose value each call gives: number `place` of those a program takes.

    Its value is the recorded one, so code that measures or prints an operation need not know.
    """

    place: int
    kind: Any  # the type of number

    def __new__(cls, value: float, place: int) -> Self:
        """Return the number at `place`, which was `value` in the recording."""
        made: Any = cls.kind.__new__(cls, value)
        made.place = place
        return made  # type: ignore[no-any-return]

    def __eq__(self, other: object) -> bool:  # no constant is equal to it
        return type(other) is type(self) and self._key() == other._key()

    def __ne__(self, other: object) -> bool:  # numbers define their own
        return not self == other

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._key()

    def _key(self) -> tuple[Any, int]:
        return self.kind(self), self.place


class UnspecialisedFloat(_Unspecialised, float):
    """An unspecialised float."""

    kind = float


class UnspecialisedInt(_Unspecialised, int):
    """An unspecialised int."""

    kind = int


def unspecialised(value: float, place: int) -> UnspecialisedFloat | UnspecialisedInt:
    """Return the unspecialised number of a program at `place`, of the type of `value`."""
    return (UnspecialisedInt if type(value) is int else UnspecialisedFloat)(value, place)


def is_unspecialised(value: Any) -> bool:
    """Return whether each call gives the value of this scalar."""
    return type(value) is UnspecialisedFloat or type(value) is UnspecialisedInt


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """A number on a tape: a number of the call, a "constant", or the result of an operation.

    Numbers of the call are "float leaf" and "int leaf". `parts` are the index of the leaf, the
    constant, or the positions of the operands on the tape.
    """

    how: str
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of two numbers on a tape by the recorded forward, and its outcome."""

    how: str
    first: int
    second: int
    outcome: bool


@dataclass(frozen=True, slots=True)
class Numbers:
    """How the unspecialised numbers of a program follow from the numbers of a call."""

    tape: tuple[TapeEntry, ...]
    compared: tuple[Comparison, ...]
    slots: tuple[int, ...]  # positions on the tape of the numbers that the program takes

    def of(self, leaves: Sequence[Any]) -> tuple[float, ...] | None:
        """Return the program's numbers for a call with these leaves of its arguments.

        None if a comparison has another outcome: the recording does not hold for this call.
        """
        values = values_on(self.tape, leaves)
        if values is None:
            return None
        for c in self.compared:
            if bool(COMPARISONS[c.how](values[c.first], values[c.second])) is not c.outcome:
                return None
        return tuple([values[place] for place in self.slots])


def values_on(tape: Sequence[TapeEntry], leaves: Sequence[Any]) -> list[Any] | None:
    """Return every number on a tape; None if one cannot be computed or has another type.

    Among operations on ints only powers may change their type with the value; they are refused.
    """
    values: list[Any] = []
    for made in tape:
        if made.how == "constant":
            values.append(made.parts[0])
            continue
        if made.how in LEAVES:
            value = leaves[made.parts[0]]
            if type(value) is not LEAVES[made.how]:
                return None
        else:
            try:
                value = OPERATIONS[made.how](*[values[place] for place in made.parts])
            except ArithmeticError:
                return None
        if type(value) is not float and type(value) is not int:  # roots of negatives are complex
            return None
        values.append(value)
    return values
