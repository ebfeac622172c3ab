"""Rows of the lower bound for storages that may be moved over a link.

A storage may be read in a phase without a recomputation if it is brought in. Let

    M[c, o] = storage o is brought in during phase c;   N[c, o] = in phase c or later
    E[o]    = storage o is brought in at all
    Z[o]    = it is elsewhere when the forward ends: read later, neither held nor made again
    W[c]    = time in phase c for which computing waits (W[-1]: in the forward)

Every schedule satisfies:

    [in]     what is brought in up to a cut takes no longer than the backward up to there, with its
             recomputations and waiting; the same for what is first read up to some stage
    [out]    what is elsewhere when the forward ends and was made by node k or later takes no longer
             than the forward from k on; all that goes out, no longer than the whole step
    [shared] where both directions take turns, together no longer than the whole step
    [host]   what is elsewhere when the forward ends fits there

Waiting is time beyond the plain step, as recomputation is. So the bound holds for slow links, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from rockmate.problems.link import Link
from rockmate.problems.problem import Problem
from rockmate.solvers.result import stages_of

_PREFIXES = 12  # rows for what is made from some node on, and for what is read up to some stage


class Droppable(Protocol):
    """A storage of the program."""

    @property
    def index(self) -> int: ...  # in the problem; -1 for phantoms
    @property
    def producer(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def bwd_users(self) -> tuple[int, ...]: ...


class LinkRows:
    """Variables of moves, and rows of what a link can carry, in a program that has R and S."""

    def __init__(self, problem: Problem, link: Link, program: Any) -> None:
        self.problem, self.link, self.program = problem, link, program
        self.storages: Sequence[Droppable] = program.storages
        self.places = [
            o
            for o, storage in enumerate(self.storages)
            if storage.index >= 0 and problem.storages[storage.index].is_movable
        ]
        phases = range(program.phases)
        self.brought = [{o: program.variable("") for o in self.places} for _ in phases]  # M
        self.later = [{o: program.variable("") for o in self.places} for _ in phases[:-1]]  # N
        self.later.append(self.brought[-1])
        self.ever = {o: program.variable("") for o in self.places}  # E
        self.elsewhere = {o: program.variable("") for o in self.places}  # Z
        # Every duration is in thousandths of the step: equal scales help the solver.
        self.unit_ms = max(problem.base_time_ms, 1e-9) / 1000
        self.waits = [program.solver.NumVar(0, math.inf, "") for _ in range(program.phases + 1)]

    def terms(self, c: int, o: int, *, is_suffix: bool) -> list[tuple[Any, float]]:
        """Return what makes storage `o` present in a phase, beside holding and recomputing it."""
        table = (self.later if is_suffix else self.brought)[c]
        return [(table[o], 1)] if o in table else []

    def add_rows(self) -> None:
        """Add the rows of the module's docstring; those of S and R must be there."""
        row, again, held = self.program._row, self.program.again, self.program.held
        phases = range(self.program.phases)
        for o in self.places:
            made = self.storages[o].producer
            for c in phases[:-1]:
                brought = ((self.brought[d][o], 1) for d in phases[c:])
                row([*brought, (self.later[c][o], -1)], least=0)
            for c in phases:
                row([(self.ever[o], 1), (self.brought[c][o], -1)], least=0)
            if self.storages[o].bwd_users:
                runs = [(again[d][made], 1) for d in phases]
                row([(self.elsewhere[o], 1), (held[0][o], 1), *runs], least=1)
            row([(self.ever[o], 1), (self.elsewhere[o], -1)], least=0)
        self._add_in()
        self._add_out()
        host = self.link.host_bytes
        if host is not None:
            unit = max(1.0, host / 1000)
            taken = self.link.host_taken
            sizes = (
                (self.elsewhere[o], -taken(self.storages[o].size_bytes) / unit) for o in self.places
            )
            row(sizes, least=-host / unit)

    # ------------------------------------------------------------------ times

    def _add_in(self) -> None:
        problem, stage = self.problem, stages_of(self.problem)
        ends = [*self.program.cut_stages, len(problem.backward_order)]
        for c, end in enumerate(ends):
            copies = [(self.brought[d][o], self._in(o)) for d in range(c + 1) for o in self.places]
            self._within(copies, self._backward_ms(end), phases=c + 1)
        # What is elsewhere when the forward ends is brought in before its first read.
        first = {
            o: min(stage[user] for user in self.storages[o].bwd_users)
            for o in self.places
            if self.storages[o].bwd_users
        }
        for end in _spread(sorted(set(first.values()))):
            copies = [(self.elsewhere[o], self._in(o)) for o, at in first.items() if at <= end]
            self._within(copies, self._backward_ms(end), phases=self.program.phases)

    def _add_out(self) -> None:
        nodes = self.problem.nodes
        forward = [node.fwd_time_ms for node in nodes]
        for k in _spread(sorted({self.storages[o].producer for o in self.places})):
            copies = [
                (self.elsewhere[o], self._out(o))
                for o in self.places
                if self.storages[o].producer >= k
            ]
            self._within(copies, sum(forward[k:]), phases=0)
        phases, whole_ms = self.program.phases, self.problem.base_time_ms
        outs = [(self.ever[o], self._out(o)) for o in self.places]
        self._within(outs, whole_ms, phases=phases)
        if self.link.is_shared:
            ins = [(table[o], self._in(o)) for table in self.brought for o in self.places]
            self._within([*outs, *ins], whole_ms, phases=phases)

    def _in(self, o: int) -> float:
        return self.link.in_ms(self.storages[o].size_bytes)

    def _out(self, o: int) -> float:
        return self.link.out_ms(self.storages[o].size_bytes)

    def _backward_ms(self, stages: int) -> float:
        return sum(self.problem.nodes[k].bwd_time_ms for k in self.problem.backward_order[:stages])

    def _within(self, copies: Iterable[tuple[Any, float]], time_ms: float, phases: int) -> None:
        """Add the row: these copies take at most this time, what is recomputed, and waiting."""
        unit, program = self.unit_ms, self.program
        terms = [(variable, -taken_ms / unit) for variable, taken_ms in copies]
        if not terms:
            return
        terms += [(wait, 1) for wait in self.waits[: phases + 1]]
        for phase in program.again[:phases]:
            terms += [
                (run, node.fwd_time_ms / unit)
                for run, node in zip(phase, self.problem.nodes, strict=True)
                if node.fwd_time_ms
            ]
        program._row(terms, least=-time_ms / unit)

    def fix(self, index: int, *, is_moved: bool) -> None:
        """Let a storage be elsewhere when the forward ends, or let it never be moved."""
        o = next(o for o in self.places if self.storages[o].index == index)
        if is_moved:
            self.elsewhere[o].SetBounds(1, 1)
            self.program.held[0][o].SetBounds(0, 0)
        else:
            self.ever[o].SetBounds(0, 0)

    def chosen(self) -> dict[int, float]:
        """Return for each movable storage how much of it is elsewhere when the forward ends."""
        found = self.elsewhere.items()
        return {self.storages[o].index: float(variable.solution_value()) for o, variable in found}


def _spread(values: Sequence[int]) -> list[int]:
    """Return a few of these values, from the first to the last."""
    if len(values) <= _PREFIXES:
        return list(values)
    return [values[i * (len(values) - 1) // (_PREFIXES - 1)] for i in range(_PREFIXES)]
