"""Rows of the lower bound for storages that may be moved over a link.

A storage may be read in a phase without a recomputation if it is brought in. Let

    M[c, o] = storage o is brought in during phase c;   N[c, o] = in phase c or later
    E[o]    = storage o is brought in at all
    Z[c, o] = it is elsewhere when phase c begins: read later, neither held nor made again
    W[c]    = time in phase c for which computing waits (W[-1]: in the forward)

Every schedule satisfies:

    [in]     what is brought in up to a cut takes no longer than the backward up to there, with its
             recomputations and waiting; the same for what is elsewhere at a cut and is read next
             up to some stage, but for the one copy that was on its way
    [out]    what is elsewhere at a cut and was made by node k or later takes no longer than the
             step from k's forward up to there; all that goes out, no longer than the whole step
    [shared] where both directions take turns, together no longer than the whole step
    [host]   what is elsewhere at a cut fits there

A storage counts as held or brought in from the end of its copy. The end of the forward is the
first cut. Waiting is time beyond the plain step, as recomputation is: slow links are covered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rockmate.problems.link import Link
from rockmate.problems.problem import Problem
from rockmate.solvers.result import stages_of

_PREFIXES = 12  # rows for what is made from some node on, and for what is read up to some stage


@dataclass(frozen=True)
class Droppable:
    """A storage that a plan may drop, or all phantoms of a node as one."""

    producer: int
    size_bytes: int
    fwd_users: tuple[int, ...]
    bwd_users: tuple[int, ...]
    index: int = -1  # of the storage; -1 for phantoms


def droppable(problem: Problem) -> Iterator[Droppable]:
    """Yield what a plan may drop, in the order of the nodes that make it."""
    for k, mask in enumerate(problem.phantom_masks):
        if mask:
            yield Droppable(k, problem.bytes_of(mask), (), (k,))
        for index in problem.products[k]:
            row = problem.storages[index]
            if not row.is_output and not row.is_phantom:
                yield Droppable(k, row.size_bytes, row.fwd_users, row.bwd_users, index)


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
        self.next_read = [self._next_reads(c) for c in phases]
        self.elsewhere = [{o: program.variable("") for o in row} for row in self.next_read]  # Z
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
            for c in phases[:-1]:
                brought = ((self.brought[d][o], 1) for d in phases[c:])
                row([*brought, (self.later[c][o], -1)], least=0)
                row([(self.ever[o], 1), (self.later[c][o], -1)], least=0)
            for c in phases:
                row([(self.ever[o], 1), (self.brought[c][o], -1)], least=0)
        # The suffix is the tighter one. With a single cut it raised no bound, and parts of storages
        # that the sum allows told better which ones to move.
        several = self.program.phases > 2
        for c, table in enumerate(self.elsewhere):
            for o, elsewhere in table.items():
                producer = self.storages[o].producer
                tables = self.program.suffix[c : c + 1] if several else again[c:]
                runs = [(table[producer], 1) for table in tables]
                row([(elsewhere, 1), (held[c][o], 1), *runs], least=1)
                row([(self.ever[o], 1), (elsewhere, -1)], least=0)
        self._add_in()
        self._add_out()
        host = self.link.host_bytes
        if host is not None:
            unit = max(1.0, host / 1000)
            taken = self.link.host_taken
            for table in self.elsewhere:
                sizes = ((v, -taken(self.storages[o].size_bytes) / unit) for o, v in table.items())
                row(sizes, least=-host / unit)

    def _next_reads(self, c: int) -> dict[int, int]:
        """Return the stage in which each storage is read first from phase c on, if it is."""
        stage, begin = stages_of(self.problem), self._begin(c)
        reads = {o: [stage[user] for user in self.storages[o].bwd_users] for o in self.places}
        later = {o: [at for at in stages if at > begin] for o, stages in reads.items()}
        return {o: min(stages) for o, stages in later.items() if stages}

    def _begin(self, c: int) -> int:
        return self.program.cut_stages[c - 1] if c else 0

    # ------------------------------------------------------------------ times

    def _add_in(self) -> None:
        ends = [*self.program.cut_stages, len(self.problem.backward_order)]
        for c, end in enumerate(ends):
            copies = [(self.brought[d][o], self._in(o)) for d in range(c + 1) for o in self.places]
            self._within(copies, self._before_ms(end), range(c + 1))
        longest_ms = max(map(self._in, self.places), default=0.0)
        for c, first in enumerate(self.next_read):
            began_ms = self._before_ms(self._begin(c)) - longest_ms if c else 0.0
            for end in _spread(sorted(set(first.values()))):
                copies = [
                    (self.elsewhere[c][o], self._in(o)) for o, at in first.items() if at <= end
                ]
                self._within(copies, self._before_ms(end) - began_ms, range(c, self.program.phases))

    def _add_out(self) -> None:
        forward = [node.fwd_time_ms for node in self.problem.nodes]
        for c, table in enumerate(self.elsewhere):
            backward_ms = self._before_ms(self._begin(c)) if c else 0.0
            for k in _spread(sorted({self.storages[o].producer for o in table})):
                copies = [
                    (elsewhere, self._out(o))
                    for o, elsewhere in table.items()
                    if self.storages[o].producer >= k
                ]
                self._within(copies, sum(forward[k:]) + backward_ms, range(-1, c))
        phases, whole_ms = range(-1, self.program.phases), self.problem.base_time_ms
        outs = [(self.ever[o], self._out(o)) for o in self.places]
        self._within(outs, whole_ms, phases)
        if self.link.is_shared:
            ins = [(table[o], self._in(o)) for table in self.brought for o in self.places]
            self._within([*outs, *ins], whole_ms, phases)

    def _in(self, o: int) -> float:
        return self.link.in_ms(self.storages[o].size_bytes)

    def _out(self, o: int) -> float:
        return self.link.out_ms(self.storages[o].size_bytes)

    def _before_ms(self, stage: int) -> float:
        """Return the time of the backward before the one that ends a stage."""
        nodes = self.problem.nodes
        return sum(nodes[k].bwd_time_ms for k in self.problem.backward_order[: max(0, stage - 1)])

    def _within(self, copies: Iterable[tuple[Any, float]], time_ms: float, phases: range) -> None:
        """Add the row: these copies take at most this time, and what these phases add to it.

        They recompute and wait. Phase -1 is the forward.
        """
        unit, program = self.unit_ms, self.program
        terms = [(variable, -taken_ms / unit) for variable, taken_ms in copies]
        if not terms:
            return
        for phase in phases:
            terms.append((self.waits[phase], 1))
            if phase < 0:
                continue
            terms += [
                (run, node.fwd_time_ms / unit)
                for run, node in zip(program.again[phase], self.problem.nodes, strict=True)
                if node.fwd_time_ms
            ]
        program._row(terms, least=-time_ms / unit)

    def fix(self, index: int, *, is_moved: bool) -> None:
        """Let a storage be elsewhere when the forward ends, or let it never be moved."""
        o = next(o for o in self.places if self.storages[o].index == index)
        if is_moved:
            self.elsewhere[0][o].SetBounds(1, 1)
            self.program.held[0][o].SetBounds(0, 0)
        else:
            self.ever[o].SetBounds(0, 0)

    def chosen(self) -> dict[int, float]:
        """Return for each movable storage how much of it is elsewhere when the forward ends."""
        found = self.elsewhere[0].items()
        return {self.storages[o].index: float(variable.solution_value()) for o, variable in found}


def _spread(values: Sequence[int]) -> list[int]:
    """Return a few of these values, from the first to the last."""
    if len(values) <= _PREFIXES:
        return list(values)
    return [values[i * (len(values) - 1) // (_PREFIXES - 1)] for i in range(_PREFIXES)]
