"""A lower bound on every schedule, by a linear program: the certificate of a plan.

For any schedule within the budget (one forward phase, then backwards in their fixed order, any
recomputation in any order and number), cut its backward phase at a few backward steps. Phase c is
what runs after cut c - 1 up to cut c. Let

    S[c, o] = storage o is held when cut c's backward starts (S[0, o]: at the end of the forward)
    R[c, k] = node k is run again in phase c
    A[c, k] = node k is run again in phase c or later (the aggregate of a suffix of phases)

in [0, 1]. Every schedule satisfies all of the following, so the least recomputation time is a
bound:

    [read]     S[c, o] + R[c, p(o)] >= 1       o is read by a backward of phase c; p(o) makes o
    [input]    R[c, k] <= S[c, o] + R[c, p(o)]  k reads o
    [keep]     S[c+1, o] <= S[c, o] + R[c, p(o)]
    [budget]   sum of S[c, o] * size + gradients and peak of the backward at the cut <= budget
    [suffix]   the first two rows with A[c] in place of R[c], for everything from phase c on, and
               A[c, k] <= sum of R[c', k] for c' >= c

The suffix rows matter: without them more cuts make the bound weaker, because a fraction recomputed
in each of several phases would count as little as a fraction recomputed once.

Outputs and phantoms: an output is held from its production on; the phantoms of a node count as one
storage whose maker is the node. Leaving out the workspace of recomputations keeps the bound valid.
CLP solves the program, with a time limit; GLOP was seen to hang on these programs.

For small graphs with a few huge storages the linear program is loose. For these the same rows are
solved with 0/1 variables, and the bound is the solver's. It holds for every schedule, whereas the
bounds of the other solvers hold for their own class of schedules.

`link_rows` has the rows for storages that may be moved. They have durations, for which CP-SAT's
bound was seen above a plan. So such problems have the linear program only.

CLP replaces Python's handler of Ctrl-C while it solves, which would end only that solve. So the
handler is restored meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rockmate.parallel import map_in_parallel
from rockmate.problems.problem import Problem
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.simulate import simulate
from rockmate.solvers.link_rows import LinkRows, droppable
from rockmate.solvers.result import stages_of

_TIME_LIMIT_MS = 8000
_LONG_NODES = 1500  # from here on each program takes half a second, so there is only one cut
_INTEGER_NODES = 70  # that make something; up to here the 0/1 program, or more cuts
_HEAVY_CUTS = 6  # at once, on such a small graph with a link
_INTEGER_LIMIT = 0.3  # its deterministic seconds, for each number of cuts
_INTEGER_CUTS = (1, 3, 6)  # at the heaviest backwards
_INTEGER_FULL = 6  # at those with most memory in use
_MOST_ROUNDS = 6  # of fixing what is moved
_AT_LEAST = 4  # of what is moved in part, the fourth part is fixed in each round
_SURELY, _HARDLY = 0.9, 0.02  # parts of a storage
_SAFETY = 1e-6  # relative, for the tolerances of the linear program


def lower_bound(problem: Problem, budget_bytes: int, *, cuts: int = 2) -> float | None:
    """Return a lower bound, in ms, on the overhead of every schedule within the budget.

    It is the best bound without a cut, with single cuts, and with the best single cuts together, at
    most `cuts`. Single cuts that do not help alone are left out. Small graphs have more cuts.
    0.0 means that no bound is known, infinity that no schedule fits.
    """
    with heard_interrupts():
        return _lower_bound(problem, budget_bytes, cuts)


def _lower_bound(problem: Problem, budget_bytes: int, cuts: int) -> float:
    best = uncut = _solve(problem, budget_bytes, ()) or 0.0
    cuts = cuts if len(problem.nodes) <= _LONG_NODES else min(cuts, 1)
    found: dict[int, float] = {}
    for stage in dict.fromkeys((*_full_stages(problem, cuts), *_heavy_stages(problem, cuts))):
        if best == math.inf:
            return best
        found[stage] = _solve(problem, budget_bytes, (stage,)) or 0.0
        best = max(best, found[stage])
    helping = (stage for stage in found if found[stage] > uncut * (1 + _SAFETY))
    strong = sorted(helping, key=lambda stage: (-found[stage], stage))
    for count in range(2, min(cuts, len(strong)) + 1):
        best = max(best, _solve(problem, budget_bytes, sorted(strong[:count])) or 0.0)
    if best == math.inf or not _is_small(problem):
        return best
    if problem.link is not None:
        heavy = sorted(_heavy_stages(problem, _HEAVY_CUTS))
        best = max(best, _solve(problem, budget_bytes, heavy) or 0.0)
    else:
        chosen = [sorted(_heavy_stages(problem, count)) for count in _INTEGER_CUTS]
        chosen.append(sorted(_full_stages(problem, _INTEGER_FULL)))
        solve = functools.partial(_solve, problem, budget_bytes, integer=True)
        best = max(best, *(found or 0.0 for found in map_in_parallel(solve, chosen)))
    return best


def storages_to_move(
    problem: Problem, budget_bytes: int, fits: Callable[[Sequence[int]], bool]
) -> Iterator[tuple[int, ...]]:
    """Yield sets of storages that linear programs move, as far as they fit together.

    The programs move parts of storages. What one of them moves most of is taken first. For another
    set it is fixed, and the program is solved again, until nothing is left.
    """
    full = _full_stages(problem, 2)
    cuts: list[tuple[int, ...]] = [(), *((stage,) for stage in full[:2])]
    fixed = cuts[:2]  # the others take longer, and are seldom better
    if _is_small(problem):  # sets differ much there
        heavy = _heavy_stages(problem, _HEAVY_CUTS)
        cuts += [(stage,) for stage in (*full[2:], *heavy[2:3])]
        fixed = list(cuts)
        cuts += [tuple(sorted(full[:2])), tuple(sorted(heavy))]
    for stages in dict.fromkeys(cuts):
        with heard_interrupts():
            program = _Program(problem, budget_bytes, stages, integer=False)
            bound, link = program.bound_ms(), program.link
            if link is None or bound is None or bound == math.inf:
                continue
            parts = link.chosen()
            yield tuple(sorted(_fitting([], parts, _ranked(parts), fits)))
            if stages in fixed:
                yield tuple(sorted(_fixed_in_turn(program, link, fits)))


def _fixed_in_turn(
    program: _Program, link: LinkRows, fits: Callable[[Sequence[int]], bool]
) -> list[int]:
    chosen: list[int] = []
    left = set(link.chosen())
    for _ in range(_MOST_ROUNDS):
        parts = {i: part for i, part in link.chosen().items() if i in left and part >= _HARDLY}
        ranked = _ranked(parts)
        sure = [i for i in ranked if parts[i] > _SURELY] or ranked[: -(-len(ranked) // _AT_LEAST)]
        chosen = _fitting(chosen, parts, sure, fits)
        for index in ranked:
            is_moved = index in chosen
            if is_moved or index in sure or not fits([*chosen, index]):
                link.fix(index, is_moved=is_moved)
                left.remove(index)
        if not sure or program.bound_ms() in (None, math.inf):
            break
    return chosen


def _ranked(parts: Mapping[int, float]) -> list[int]:
    return sorted(parts, key=lambda i: (-round(parts[i], 3), i))


def _fitting(
    chosen: Sequence[int],
    parts: Mapping[int, float],
    ranked: Sequence[int],
    fits: Callable[[Sequence[int]], bool],
) -> list[int]:
    found = list(chosen)
    for index in ranked:
        if parts[index] >= _HARDLY and fits([*found, index]):
            found.append(index)
    return found


def _is_small(problem: Problem) -> bool:
    return sum(map(bool, problem.products)) <= _INTEGER_NODES


def _full_stages(problem: Problem, cuts: int) -> list[int]:
    """Return stages whose backward finds most memory in use if everything is kept."""
    steps = no_recomputation(problem)
    during = simulate(problem, steps).peak_during
    backwards = [t for t, step in enumerate(steps) if step.kind == "B"]
    met = [(-during[t], stage) for stage, t in enumerate(backwards, start=1)]
    apart = max(1, len(met) // 40)
    return _apart([stage for _, stage in sorted(met)], apart, cuts + 1 if cuts else 0)


def _heavy_stages(problem: Problem, cuts: int) -> list[int]:
    """Return stages whose backward alone needs most memory, at some distance, largest first."""
    needs = []
    for stage, k in enumerate(problem.backward_order, start=1):
        node = problem.nodes[k]
        read = problem.bytes_of(problem.bwd_input_masks[k])
        needs.append((-(read + node.grads_before_bytes + node.bwd_peak_bytes), stage))
    apart = max(1, len(needs) // (2 * cuts + 1))
    return _apart([stage for _, stage in sorted(needs)], apart, cuts)


def _apart(stages: Sequence[int], apart: int, count: int) -> list[int]:
    chosen: list[int] = []
    for stage in stages:
        if len(chosen) < count and all(abs(stage - other) >= apart for other in chosen):
            chosen.append(stage)
    return chosen


def _solve(
    problem: Problem, budget_bytes: int, cut_stages: Sequence[int], *, integer: bool = False
) -> float | None:
    """Solve the program for these cuts: bound in ms, infinity if infeasible, None if not solved."""
    return _Program(problem, budget_bytes, cut_stages, integer=integer).bound_ms()


class _Program:
    """The linear program for some cuts, with S, R and A of the module's docstring."""

    def __init__(
        self, problem: Problem, budget_bytes: int, cut_stages: Sequence[int], *, integer: bool
    ) -> None:
        from ortools.linear_solver import pywraplp

        self.problem, self.cut_stages, self.integer = problem, cut_stages, integer
        self.solver = pywraplp.Solver.CreateSolver("SAT" if integer else "CLP")
        if integer:
            self.solver.SetSolverSpecificParametersAsString(
                f"num_workers:1 max_deterministic_time:{_INTEGER_LIMIT}"
            )
        else:
            self.solver.SetTimeLimit(_TIME_LIMIT_MS)
        self.solved = pywraplp.Solver.OPTIMAL
        self.infeasible = pywraplp.Solver.INFEASIBLE
        solver = self.solver
        self.variable = solver.BoolVar if integer else functools.partial(solver.NumVar, 0, 1)
        self.phases = len(cut_stages) + 1
        self.storages = list(droppable(problem))
        count = len(problem.nodes)
        self.held = [self._variables(len(self.storages)) for _ in range(self.phases)]  # S[c]
        self.again = [self._variables(count) for _ in range(self.phases)]  # R[c]
        self.suffix = self._add_suffixes()  # A[c]
        self.link = None if problem.link is None else LinkRows(problem, problem.link, self)
        self._add_reads()
        self._add_room(budget_bytes)
        if self.link is not None:
            self.link.add_rows()

    def _variables(self, count: int) -> list[Any]:
        return [self.variable("") for _ in range(count)]

    def _row(self, terms: Iterable[tuple[Any, float]], *, least: float) -> None:
        """Add the row `least <= sum of terms`, of (variable, factor); each variable occurs once."""
        # Building expressions would take several times as long as solving the program.
        row = self.solver.Constraint(least, math.inf)
        for variable, factor in terms:
            row.SetCoefficient(variable, factor)

    def _add_suffixes(self) -> list[list[Any]]:
        suffix: list[list[Any]] = []
        for c in range(self.phases - 1):
            suffix.append(self._variables(len(self.problem.nodes)))
            for k, run in enumerate(suffix[c]):
                later = [(self.again[d][k], 1) for d in range(c, self.phases)]
                self._row([*later, (run, -1)], least=0)
        return [*suffix, self.again[-1]]

    def _add_reads(self) -> None:
        """Each run finds its inputs: held at the beginning of the phase, or made in it."""
        stage = stages_of(self.problem)
        held, again = self.held, self.again
        for o, storage in enumerate(self.storages):
            made = storage.producer
            read_in = {
                sum(cut < stage[user] for cut in self.cut_stages) for user in storage.bwd_users
            }
            last = max(read_in, default=-1)
            for c in range(self.phases):
                runs = [again[c]] if self.suffix[c] is again[c] else [again[c], self.suffix[c]]
                for table in runs:
                    there: list[tuple[Any, float]] = [(held[c][o], 1), (table[made], 1)]
                    if self.link is not None:
                        there += self.link.terms(c, o, is_suffix=table is not again[c])
                    if (c in read_in) if table is again[c] else (c <= last):
                        self._row(there, least=1)
                    for user in storage.fwd_users:
                        self._row([*there, (table[user], -1)], least=0)
                if c + 1 < self.phases:
                    kept: list[tuple[Any, float]] = [(held[c][o], 1), (again[c][made], 1)]
                    kept.append((held[c + 1][o], -1))
                    if self.link is not None:
                        kept += self.link.terms(c, o, is_suffix=False)
                    self._row(kept, least=0)

    def _add_room(self, budget_bytes: int) -> None:
        """Before the backward at a cut, held storages and the backward's needs fit the budget."""
        problem = self.problem
        unit = max(1.0, budget_bytes / 1000)  # thousandths of the budget, for good scaling
        outputs_bytes = sum(row.size_bytes for row in problem.storages if row.is_output)
        room = (budget_bytes - outputs_bytes) / unit
        sizes = [-storage.size_bytes / unit for storage in self.storages]
        self._row(zip(self.held[0], sizes, strict=True), least=-room)
        for c, cut in enumerate(self.cut_stages):
            k = problem.backward_order[cut - 1]
            node = problem.nodes[k]
            own = (node.grads_before_bytes + node.bwd_peak_bytes) / unit
            at_cut = self.held[c + 1]  # kept, or made in the phase
            for o, storage in enumerate(self.storages):
                if k in storage.bwd_users:
                    self._row([(at_cut[o], 1)], least=1)
            self._row(zip(at_cut, sizes, strict=True), least=own - room)

    def bound_ms(self) -> float | None:
        """Minimize the time of all recomputations."""
        times = [node.fwd_time_ms for node in self.problem.nodes]
        scale = max(sum(times), 1e-9) / 1000
        objective = self.solver.Objective()
        for phase in self.again:
            for time, run in zip(times, phase, strict=True):
                objective.SetCoefficient(run, time / scale)
        if self.link is not None:
            for wait in self.link.waits:
                objective.SetCoefficient(wait, self.link.unit_ms / scale)
        objective.SetMinimization()
        status = self.solver.Solve()
        if status == self.infeasible:
            return math.inf
        if self.integer:
            value = float(self.solver.Objective().BestBound())
        elif status == self.solved:
            value = float(self.solver.Objective().Value())
        else:
            return None
        if math.isnan(value):
            return None
        return max(0.0, value * scale * (1 - _SAFETY) - 1e-9 * scale)


_LOOK_S = 0.01


@contextlib.contextmanager
def heard_interrupts() -> Iterator[None]:
    """While active, Ctrl-C reaches Python: KeyboardInterrupt is raised when the solver returns."""
    try:
        get, put = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    except AttributeError:  # another Python
        yield
        return
    get.restype = put.restype = ctypes.c_void_p
    put.argtypes = [ctypes.c_int, ctypes.c_void_p]
    ours, over = get(signal.SIGINT), threading.Event()

    def keep() -> None:
        while not over.wait(_LOOK_S):
            if get(signal.SIGINT) != ours:
                put(signal.SIGINT, ours)

    keeper = threading.Thread(target=keep, name="rockmate-interrupts", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()
        put(signal.SIGINT, ours)
