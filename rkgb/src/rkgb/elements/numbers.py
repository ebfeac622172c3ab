"""Unspecialised numbers: numbers of a call, and Python's arithmetic on them before torch gets them.

A step recorded with a scale of 0.5 also serves a scale of 0.3: only scalars of operations differ,
as long as Python takes the same branches. A tape says how each scalar follows from the arguments of
a call. The outcomes of Python's comparisons are its guards.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv")},
    **{name: getattr(operator, name) for name in ("mod", "pow", "neg", "pos", "abs")},
}
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
}

# Kinds of tape entries that are numbers of the call, with their types.
LEAVES: dict[str, type] = {"float leaf": float, "int leaf": int}


class UnspecialisedFloat(float):
    """A scalar argument whose value each call gives: number `place` of those a program takes.

    Its value is the recorded one, so code that measures or prints an operation need not know.
    """

    __slots__ = ("place",)
    place: int
    kind = float

    def __new__(cls, value: float, place: int) -> UnspecialisedFloat:
        """Return the number at `place`, which was `value` in the recording."""
        made = super().__new__(cls, value)
        made.place = place
        return made

    def __eq__(self, other: object) -> bool:  # no constant is equal to it
        if type(other) is not UnspecialisedFloat:
            return False
        return (float(self), self.place) == (float(other), other.place)

    def __ne__(self, other: object) -> bool:  # float defines its own
        return not self == other

    def __hash__(self) -> int:
        return hash((float(self), self.place))

    def __reduce__(self) -> tuple[Any, ...]:
        return UnspecialisedFloat, (float(self), self.place)


class UnspecialisedInt(int):
    """The same for an int. Python does not allow `__slots__` here."""

    place: int
    kind = int

    def __new__(cls, value: int, place: int) -> UnspecialisedInt:
        """Return the number at `place`, which was `value` in the recording."""
        made = super().__new__(cls, value)
        made.place = place
        return made

    def __eq__(self, other: object) -> bool:
        if type(other) is not UnspecialisedInt:
            return False
        return (int(self), self.place) == (int(other), other.place)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((int(self), self.place))

    def __reduce__(self) -> tuple[Any, ...]:
        return UnspecialisedInt, (int(self), self.place)


def unspecialised(value: float, place: int) -> UnspecialisedFloat | UnspecialisedInt:
    """Return the unspecialised number of a program at `place`, of the type of `value`."""
    if type(value) is int:
        return UnspecialisedInt(value, place)
    return UnspecialisedFloat(value, place)


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
