"""In-place sums of the gradients of leaves that a step uses several times.

Autograd keeps the first gradient of a leaf and adds the others to it, one by one. Handing each one
over separately costs as much as several small operations. So the later ones are added in place to
the first, which gives the same sum in the same order. This is correct only if autograd keeps the
tensor that was handed over. If the leaf is also used outside of the module, and that gradient came
first, autograd has added the tensor to the other one and dropped it. A weak reference shows this.
Then the later ones wait, and are handed over one by one at the end.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from rkgb.elements import TensorInfo
from rkgb.graphs import SimplifiedGraph
from rkgb.run import Call, Drop, Give, Statement, StepProgram, Sum, read_by

# Number of backwards without gradients from outside after which none are expected. If that turns
# out wrong, waiting gradients take memory that is not planned.
_QUIET_BACKWARDS = 3
# Sums need another program, which takes time to make. They pay if there is one in so many
# statements.
_OTHERS_PER_SUM = 40


Late = Callable[[Tensor], None]


@dataclass(frozen=True)
class SharedUses:
    """The use of each gradient of each hand-over in sums, by number of the hand-over."""

    leaves: tuple[tuple[str, ...], ...]
    firsts: tuple[tuple[int, ...], ...]  # gradients to which others are added
    later: tuple[tuple[str, ...], ...]  # the leaf to whose sum a gradient is added, or ""
    ends: tuple[tuple[tuple[str, int], ...], ...]  # completed sums, and the number of added ones
    statements: int  # of the whole backward

    @classmethod
    def of(cls, graph: SimplifiedGraph, program: StepProgram) -> SharedUses:
        """Find the leaves whose later gradients may be added to the first."""
        infos = graph.infos
        gives = [give for give in program.gives if not give.output]
        leaves = tuple(tuple(leaf for leaf, _ in give.gradients) for give in gives)
        uses: dict[str, list[tuple[int, int, str]]] = {}
        for i, give in enumerate(gives):
            for slot, (leaf, value) in enumerate(give.gradients):
                if value:
                    uses.setdefault(leaf, []).append((i, slot, value))
        firsts: list[list[int]] = [[] for _ in leaves]
        later = [[""] * len(part) for part in leaves]
        ends: list[list[tuple[str, int]]] = [[] for _ in leaves]
        alone = _alone_once_given(graph, program)
        for leaf, ((i, slot, value), *rest) in uses.items():
            first = infos[value]
            added = [use for use in rest if use[0] > i]
            alike = all(_layout(infos[name]) == _layout(first) for _, _, name in added)
            if added and alike and (i, slot) in alone and first.is_dense:
                firsts[i].append(slot)
                for j, other, _ in added:
                    later[j][other] = leaf
                ends[added[-1][0]].append((leaf, len(added)))
        return cls(
            *(leaves, tuple(map(tuple, firsts)), tuple(map(tuple, later)), tuple(map(tuple, ends))),
            statements=len(program.backward),
        )

    @property
    def are_many(self) -> bool:
        """Whether there are enough sums for another program."""
        added = sum(many for ends in self.ends for _, many in ends)
        return added * _OTHERS_PER_SUM >= self.statements > 0

    def in_sums(self, program: StepProgram) -> StepProgram:
        """Return the program that adds later gradients of a leaf to its first.

        A sum has one edge at its end for each added gradient, because these may have to wait.
        """
        lines: list[Statement] = []
        i = -1
        for statement in program.backward:
            if isinstance(statement, Give) and not statement.output:
                i += 1
                lines += self._summed(i, statement)
            else:
                lines.append(statement)
        return replace(program, backward=tuple(lines))

    def serves(self, other: SharedUses) -> bool:
        """Return whether another backward with the same places has the same sums."""
        mine = self.firsts, self.later, self.ends
        return mine == (other.firsts, other.later, other.ends)

    def waiting(self, program: StepProgram) -> StepProgram:
        """Return the program with the hand-overs of the one in sums, but without sums.

        Gradients that would be added to a first one wait, and are handed over separately at the
        end.
        """
        lines: list[Statement] = []
        waiting: dict[str, list[str]] = {}
        held: set[str] = set()
        i = -1
        for statement in program.backward:
            if isinstance(statement, Give) and not statement.output:
                i += 1
                lines += self._handed_over_late(i, statement, waiting, held)
            elif isinstance(statement, Drop):
                now = tuple(name for name in statement.names if name not in held)
                lines += [Drop(now)] if now else []
            elif isinstance(statement, Call):
                frees = tuple(name for name in statement.frees if name not in held)
                lines.append(replace(statement, frees=frees))
            else:
                lines.append(statement)
        return replace(program, backward=tuple(lines))

    def _handed_over_late(
        self, i: int, give: Give, waiting: dict[str, list[str]], held: set[str]
    ) -> list[Statement]:
        alone = []
        for (leaf, value), later in zip(give.gradients, self.later[i], strict=True):
            if not later:
                alone.append((leaf, value))
            elif value:
                waiting.setdefault(later, []).append(value)
                held.add(value)
        dropped = [name for name in give.dropped if name not in held]
        for leaf, added in self.ends[i]:
            values = waiting.pop(leaf, [])
            held.difference_update(values)
            dropped += values
            alone += [(leaf, value) for value in [*values, *[""] * (added - len(values))]]
        now = tuple(dict.fromkeys(dropped))
        if alone or self.ends[i]:
            return [replace(give, gradients=tuple(alone), dropped=now)]
        return [Drop(now)] if now else []

    def _summed(self, i: int, give: Give) -> list[Statement]:
        lines: list[Statement] = []
        alone = []
        for slot, (leaf, value) in enumerate(give.gradients):
            if self.later[i][slot]:
                lines.append(Sum("add", leaf, value))
                continue
            alone.append((leaf, value))
            if slot in self.firsts[i]:
                lines.append(Sum("first", leaf, value))
        if alone or self.ends[i]:
            return [*lines, replace(give, gradients=tuple(alone), ends=self.ends[i])]
        return [*lines, Drop(give.dropped)] if give.dropped else lines


def _alone_once_given(graph: SimplifiedGraph, program: StepProgram) -> set[tuple[int, int]]:
    """Return the gradients whose memory belongs to autograd alone once they are handed over."""
    basic, infos = graph.basic, graph.infos
    made = {infos[name].alias_of for op in basic.backward for name in op.results if name}
    passed = (*basic.externals, *program.tangents, *program.saved)  # random states have no info
    others = {infos[name].alias_of for name in passed if name in infos}
    given = Counter(infos[v].alias_of for give in program.gives for _, v in give.gradients if v)
    read_later: set[str] = set()
    found: set[tuple[int, int]] = set()
    i = len([give for give in program.gives if not give.output])
    for statement in reversed(program.backward):
        if isinstance(statement, Give) and not statement.output:
            i -= 1
            for slot, (_, value) in enumerate(statement.gradients):
                if not value:
                    continue
                root = infos[value].alias_of
                is_shared = root in others or root in read_later or given[root] > 1
                if root in made and not is_shared:
                    found.add((i, slot))
        names = read_by(statement)
        read_later.update(infos[name].alias_of for name in names if name in infos)
    return found


def _layout(info: TensorInfo) -> tuple[Any, ...]:
    return info.dtype, info.shape, info.stride


@dataclass
class ArrivalOrder:
    """Observations whether gradients from outside arrive before those of a program."""

    quiet: int = 0
    noisy: bool = False
    in_parts: bool = False  # backwards are split, and need each part separately

    @property
    def expect_none(self) -> bool:
        """Whether the first gradient was the program's in enough backwards."""
        return not self.noisy and self.quiet >= _QUIET_BACKWARDS


@dataclass
class FirstsWatch:
    """Observes, in a backward without sums, whether autograd keeps the first gradients."""

    uses: SharedUses
    arrivals: ArrivalOrder
    _first: dict[str, weakref.ref[Tensor]] = field(default_factory=dict)
    _found: set[str] = field(default_factory=set)

    def look(self, give: int, given: Sequence[Tensor | None]) -> None:
        """Observe the gradients of a hand-over; an opaque call may give none."""
        for slot in self.uses.firsts[give]:
            first = given[slot]
            if first is not None:
                self._first[self.uses.leaves[give][slot]] = weakref.ref(first)
        kept = (leaf for leaf in self.uses.later[give] if leaf in self._first)
        self._found.update(leaf for leaf in kept if self._first[leaf]() is not None)

    def finish(self) -> None:
        """Store, after a complete backward, whether other gradients came first."""
        summed = {leaf for part in self.uses.ends for leaf, _ in part}
        self.arrivals.noisy |= not summed <= self._found
        self.arrivals.quiet += 1


class RunningSums:
    """The sums of one backward; `watched`: weak references show what autograd keeps."""

    def __init__(self, arrivals: ArrivalOrder, watched: bool) -> None:
        self.arrivals, self.watched = arrivals, watched
        self._late: dict[str, list[Tensor]] = {}

    def first(self, leaf: str, gradient: Tensor) -> tuple[Callable[[], Tensor | None], Late]:
        """Start the sum of a leaf with the first gradient, which autograd gets.

        Return a function that gives the sum if autograd has kept that tensor, else None, and a list
        for the gradients that then have to wait.
        """
        late = self._late[leaf] = []
        return weakref.ref(gradient) if self.watched else _nothing, late.append

    def end(self, leaf: str, added: int) -> list[Tensor | None]:
        """Return the gradients for the edges at the end of a leaf's sum: the waiting ones."""
        late = self._late.pop(leaf)
        self.arrivals.noisy |= bool(late)
        return [*late, *[None] * (added - len(late))]


def _nothing() -> None:
    return None
