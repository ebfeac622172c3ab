"""Numbers that a call brings, and what Python's arithmetic makes of them before torch gets it.

A step that was recorded with a scale of 0.5 is the step for a scale of 0.3 with other scalars in
it, as long as Python would have gone the same way. Both are written down here: how each scalar
follows from the arguments of a call, and how every comparison that Python has made came out.
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

# Numbers of a call on a tape, and their types.
LEAVES: dict[str, type] = {"leaf": float, "whole leaf": int}


class Number(float):
    """A scalar argument that each call brings anew: number `place` of those that a program takes.

    Its value is that of the recording, so that whoever measures or prints it need not know.
    """

    __slots__ = ("place",)
    place: int
    kind = float

    def __new__(cls, value: float, place: int) -> Number:
        """Return the number at `place`, which was `value` in the recording."""
        made = super().__new__(cls, value)
        made.place = place
        return made

    def __eq__(self, other: object) -> bool:  # no constant is equal to it
        return type(other) is Number and (float(self), self.place) == (float(other), other.place)

    def __ne__(self, other: object) -> bool:  # a float has one of its own
        return not self == other

    def __hash__(self) -> int:
        return hash((float(self), self.place))

    def __reduce__(self) -> tuple[Any, ...]:
        return Number, (float(self), self.place)


class WholeNumber(int):
    """The same for an int: no slots, which Python has not for ints."""

    place: int
    kind = int

    def __new__(cls, value: int, place: int) -> WholeNumber:
        """Return the number at `place`, which was `value` in the recording."""
        made = super().__new__(cls, value)
        made.place = place
        return made

    def __eq__(self, other: object) -> bool:
        return type(other) is WholeNumber and (int(self), self.place) == (int(other), other.place)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((int(self), self.place))

    def __reduce__(self) -> tuple[Any, ...]:
        return WholeNumber, (int(self), self.place)


def number_at(value: float, place: int) -> Number | WholeNumber:
    """Return what stands for a number of a program: an int where it is one."""
    return WholeNumber(value, place) if type(value) is int else Number(value, place)


def is_number_of_calls(value: Any) -> bool:
    """Whether a scalar is one that each call brings anew."""
    return type(value) is Number or type(value) is WholeNumber


@dataclass(frozen=True, slots=True)
class Made:
    """A number on a tape: of the call, a "constant", or what an operation makes.

    A "leaf" of the call is a float, a "whole leaf" an int. `parts` are the number of the leaf, the
    constant, or the places of the operands on the tape.
    """

    how: str
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison of two numbers on a tape that a forward has made, and how it came out."""

    how: str
    first: int
    second: int
    outcome: bool


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a program takes from the numbers of a call."""

    tape: tuple[Made, ...]
    compared: tuple[Compared, ...]
    slots: tuple[int, ...]  # the places on the tape of what the program takes

    def of(self, leaves: Sequence[Any]) -> tuple[float, ...] | None:
        """Return what the program takes for a call with these leaves of its arguments.

        None where Python would go another way with them, and the recording does not hold.
        """
        values = values_on(self.tape, leaves)
        if values is None:
            return None
        for c in self.compared:
            if bool(COMPARISONS[c.how](values[c.first], values[c.second])) is not c.outcome:
                return None
        return tuple([values[place] for place in self.slots])


def values_on(tape: Sequence[Made], leaves: Sequence[Any]) -> list[Any] | None:
    """Return every number on a tape; None where one of them is none, or of another type.

    Of ints only powers may be of another type for other values, and these are not followed.
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
