"""A graph of operations as Checkmate, Moccasin and DTR see a network."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Result:
    """Memory that an operation makes; a kept one lives to the end, once it is there."""

    size_bytes: int
    is_kept: bool = False


@dataclass(frozen=True)
class Operation:
    """An operation, what it makes, and what it reads: (place of the operation, which result)."""

    name: str
    time: int  # in the unit of its file
    results: tuple[Result, ...]
    reads: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class OperationGraph:
    """Operations in the order in which they run if nothing is recomputed.

    The first `head` ones are those that a plan may run again, once all of them have run: of a
    training step, its forward.
    """

    name: str
    operations: tuple[Operation, ...]
    head: int

    def __post_init__(self) -> None:
        for place, operation in enumerate(self.operations):
            if any(not 0 <= read < place for read, _ in operation.reads):
                raise ValueError(f"{self.name}: {operation.name} reads what is not there yet")
        if not 0 <= self.head <= len(self.operations):
            raise ValueError(f"{self.name}: a head of {self.head} operations")

    @property
    def time(self) -> int:
        """Time of the operations, each run once."""
        return sum(operation.time for operation in self.operations)

    def with_head(self, head: int) -> OperationGraph:
        """Return the same graph, of which another part may be recomputed."""
        return replace(self, head=head)
