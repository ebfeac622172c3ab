"""The vocabulary of a plan: run a node's forward, run a node's backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple


class Step(NamedTuple):
    """One step: `Step("F", 3)` runs the forward of node 3, `Step("B", 3)` its backward."""

    kind: Literal["F", "B"]
    node: int

    def __str__(self) -> str:
        return f"{self.kind}{self.node}"

    @classmethod
    def of_text(cls, word: str) -> Step:
        """Read what `str` wrote."""
        if word[:1] not in ("F", "B") or not word[1:].isdigit():
            raise ValueError(f"{word!r} is no step; expected F or B and the number of a node")
        return cls("F" if word[0] == "F" else "B", int(word[1:]))


Steps = tuple[Step, ...]


def first_forwards(steps: Iterable[tuple[str, int]]) -> list[bool]:
    """Return for each step whether it is the first forward of its node."""
    seen: set[int] = set()
    found = []
    for kind, node in steps:
        found.append(kind == "F" and node not in seen)
        seen.add(node)
    return found


def end_of_forward(steps: Sequence[tuple[str, int]], count: int) -> int:
    """Return how many steps the forward takes: up to the first one of the last of `count` nodes."""
    return next((t + 1 for t, step in enumerate(steps) if step == ("F", count - 1)), len(steps))
