"""The statements of a step program, with the variables that each reads and makes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from rkgb.elements import Op, target_of


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin of a part: F(k), perhaps as a recomputation, or B(k)."""

    kind: Literal["F", "B"]
    node: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """Run one operation; the arguments `frees` are donated to it."""

    op: Op
    frees: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete these variables."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """`name` becomes a copy of `source`."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class Draw:
    """Save the random state as `name`, or restore the one of that name."""

    name: str
    kind: Literal["keep", "put back"]


@dataclass(frozen=True, slots=True)
class Give:
    """Hand gradients over to autograd: (leaf, value or "" for none), in order; it drops the values.

    `ends` are the sums that end here: (leaf, number of gradients added to its first). Parts of an
    output's gradient are handed over alone; after the last one the sum is received as a value.
    """

    node: int
    gradients: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...]
    ends: tuple[tuple[str, int], ...] = ()
    output: str = ""
    receives: str = ""

    @property
    def leaves(self) -> tuple[str, ...]:
        """The leaves of these gradients, including those of sums that end here.

        Parts of the gradient of an output have no leaf.
        """
        if self.output:
            return ()
        late = (leaf for leaf, added in self.ends for _ in range(added))
        return (*(leaf for leaf, _ in self.gradients), *late)


@dataclass(frozen=True, slots=True)
class Sum:
    """Mark a value as the first gradient of a leaf, or add it to the first one."""

    kind: Literal["first", "add"]
    leaf: str
    value: str


@dataclass(frozen=True, slots=True)
class TakeArena:
    """Take the memory on the other side that the moves of this step need, as `moving`."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class MoveOut:
    """Start copying the storage of `source` to a place in the arena; `name` is the move."""

    name: str
    source: str
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Moving:
    """Free the memory of a storage once it has been copied, start copying back, or wait for it."""

    name: str
    kind: Literal["leave", "back", "arrive"]


Statement = Begin | Call | Drop | Copy | Draw | Give | Sum | TakeArena | MoveOut | Moving


@dataclass(frozen=True)
class StepProgram:
    """The statements of a forward and of its backward, with inputs, outputs and saved tensors."""

    forward: tuple[Statement, ...]
    backward: tuple[Statement, ...]
    externals: tuple[str, ...]  # what the forward takes, in order
    outputs: tuple[str, ...]  # values that the user gets
    saved: tuple[str, ...]  # variables that the forward saves for the backward
    tangents: tuple[str, ...]  # gradients of outputs that the backward takes

    @cached_property
    def gives(self) -> tuple[Give, ...]:
        """The hand-overs of the backward, in order."""
        return tuple(s for s in self.backward if isinstance(s, Give))

    @property
    def calls(self) -> Iterator[Op]:
        """The operations that it calls, in order."""
        for statement in (*self.forward, *self.backward):
            if isinstance(statement, Call):
                yield statement.op

    @cached_property
    def arena_bytes(self) -> int:
        """The bytes that its moves take on the other side, from its forward to its backward."""
        return sum(s.size_bytes for s in self.forward if isinstance(s, TakeArena))

    @cached_property
    def has_sums(self) -> bool:
        """Whether the backward adds gradients to ones that it has handed over."""
        return any(isinstance(s, Sum) for s in self.backward)

    @cached_property
    def runs_again(self) -> bool:
        """Whether the backward recomputes a forward."""
        return any(isinstance(s, Begin) and s.again for s in self.backward)

    @cached_property
    def read_again(self) -> frozenset[str]:
        """The variables that recomputations in the backward read."""
        found: set[str] = set()
        again = False
        for statement in self.backward:
            if isinstance(statement, Begin):
                again = statement.again
            elif isinstance(statement, Call) and (again or target_of(statement.op).is_half):
                found.update(statement.op.inputs)
        return frozenset(found)

    def reads_of_backward(self) -> Iterator[tuple[tuple[str, ...], bool]]:
        """Yield what each statement of the backward reads, and whether it hands gradients over."""
        for statement in self.backward:
            yield read_by(statement), isinstance(statement, Give)


def made_by(statement: Statement) -> tuple[str, ...]:
    """Return the variables that a statement makes."""
    if isinstance(statement, Call):
        return tuple(filter(None, statement.op.results))
    if isinstance(statement, TakeArena):
        return ("moving",)
    if isinstance(statement, Copy | MoveOut) or (
        isinstance(statement, Draw) and statement.kind == "keep"
    ):
        return (statement.name,)
    if isinstance(statement, Give) and statement.receives:
        return (statement.receives,)
    return ()


def read_by(statement: Statement) -> tuple[str, ...]:
    """Return the variables that a statement reads."""
    if isinstance(statement, Call):
        return tuple(dict.fromkeys(statement.op.inputs))
    if isinstance(statement, Copy):
        return (statement.source,)
    if isinstance(statement, MoveOut):
        return statement.source, "moving"
    if isinstance(statement, Moving) or (
        isinstance(statement, Draw) and statement.kind == "put back"
    ):
        return (statement.name,)
    if isinstance(statement, Give):
        return tuple(dict.fromkeys(value for _, value in statement.gradients if value))
    if isinstance(statement, Sum):
        return (statement.value,)
    return ()


def dropped_by(statement: Statement) -> tuple[str, ...]:
    """Return the variables that a statement lets go."""
    match statement:
        case Call(frees=names) | Drop(names) | Give(dropped=names):
            return names
    return ()


def free_variables(statements: Iterable[Statement]) -> set[str]:
    """Return the variables that the statements read without having made them."""
    made: set[str] = set()
    free: set[str] = set()
    for statement in statements:
        free.update(name for name in read_by(statement) if name not in made)
        made.update(made_by(statement))
    return free
