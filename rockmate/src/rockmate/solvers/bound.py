"""A linear program under every schedule: the certificate of a plan.

For any schedule within the budget (one forward phase, then backwards in their fixed order, any
recomputation in any order and number), cut its backward phase at a few backward steps. Phase c is
what runs after cut c - 1 up to cut c. Let

    S[c, o] = storage o is held when cut c's backward starts (S[0, o]: at the end of the forward)
    R[c, k] = node k is run again in phase c
    A[c, k] = node k is run again in phase c or later (the aggregate of a suffix of phases)

in [0, 1]. Then all of the following hold, so the least recomputation time under them is a bound:

    [read]     S[c, o] + R[c, p(o)] >= 1       o is read by a backward of phase c; p(o) makes o
    [input]    R[c, k] <= S[c, o] + R[c, p(o)]  k reads o
    [keep]     S[c+1, o] <= S[c, o] + R[c, p(o)]
    [budget]   sum of S[c, o] * size + gradients and peak of the backward at the cut <= budget
    [suffix]   the first two rows with A[c] in place of R[c], for everything from phase c on, and
               A[c, k] <= sum of R[c', k] for c' >= c

The suffix rows matter: without them more cuts make the bound weaker, because a fraction recomputed
in each of several phases would count as little as a fraction recomputed once.

Outputs and phantoms: an output is held from its production on; the phantoms of a node count as one
storage whose maker is the node. The workspace of recomputations is left out, which keeps the bound
valid. Solved by CLP with a time limit; GLOP was seen to hang on these programs.

For small graphs with a few huge storages the linear program is loose. There the same rows are
solved with 0/1 variables (which is what they stand for), and the solver's own bound is taken: it
holds for every schedule, unlike that of a solver whose class of schedules is smaller.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from rockmate.planners.simple import no_recomputation
from rockmate.problem import Problem
from rockmate.simulate import simulate
from rockmate.solvers.result import stages_of

_TIME_LIMIT_MS = 8000
_INTEGER_NODES = 70  # up to so many nodes the 0/1 program is tried
_INTEGER_LIMIT = 0.3  # its deterministic seconds, for each number of cuts
_INTEGER_CUTS = (1, 3, 6)
_SAFETY = 1e-6  # relative: what the linear program's tolerances may add


def lower_bound(problem: Problem, budget_bytes: int, *, cuts: int = 2) -> float | None:
    """Return a bound, in ms, under the overhead of every schedule within the budget.

    The best without a cut, with single cuts, and with the best of these together, `cuts` at most.
    0.0 where nothing better is known, infinity where the program proves that no schedule fits.
    """
    best = _solve(problem, budget_bytes, ()) or 0.0
    found: dict[int, float] = {}
    for stage in dict.fromkeys((*_full_stages(problem, cuts), *_heavy_stages(problem, cuts))):
        if best == math.inf:
            return best
        found[stage] = _solve(problem, budget_bytes, (stage,)) or 0.0
        best = max(best, found[stage])
    strong = sorted(found, key=lambda stage: (-found[stage], stage))
    for count in range(2, cuts + 1):
        best = max(best, _solve(problem, budget_bytes, sorted(strong[:count])) or 0.0)
    if len(problem.nodes) <= _INTEGER_NODES:
        for count in _INTEGER_CUTS:
            heavy = sorted(_heavy_stages(problem, count))
            best = max(best, _solve(problem, budget_bytes, heavy, integer=True) or 0.0)
    return best


def _full_stages(problem: Problem, cuts: int) -> list[int]:
    """Stages whose backward meets most memory when everything is kept: what a budget cuts first."""
    steps = no_recomputation(problem)
    during = simulate(problem, steps).peak_during
    backwards = [t for t, step in enumerate(steps) if step.kind == "B"]
    met = [(-during[t], stage) for stage, t in enumerate(backwards, start=1)]
    apart = max(1, len(met) // 40)
    return _apart([stage for _, stage in sorted(met)], apart, cuts + 1 if cuts else 0)


def _heavy_stages(problem: Problem, cuts: int) -> list[int]:
    """Stages whose backward needs most by itself, not too near to each other, heaviest first."""
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
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("SAT" if integer else "CLP")
    if integer:
        solver.SetSolverSpecificParametersAsString(
            f"num_workers:1 max_deterministic_time:{_INTEGER_LIMIT}"
        )
    else:
        solver.SetTimeLimit(_TIME_LIMIT_MS)
    variable = solver.BoolVar if integer else functools.partial(solver.NumVar, 0, 1)
    count = len(problem.nodes)
    stage = stages_of(problem)
    phases = len(cut_stages) + 1
    unit = max(1.0, budget_bytes / 1000)  # bytes in thousandths of the budget: well scaled

    # storages that can be dropped at all, the phantoms of a node as one
    storages: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []
    outputs_bytes = 0
    for k in range(count):
        phantom = problem.bytes_of(problem.phantom_masks[k])
        if problem.phantom_masks[k]:
            storages.append((k, phantom, (), (k,)))
        for index in problem.products[k]:
            row = problem.storages[index]
            if row.is_output:
                outputs_bytes += row.size_bytes
            elif not row.is_phantom:
                storages.append((k, row.size_bytes, row.fwd_users, row.bwd_users))

    def phase_of(node: int) -> int:
        return sum(1 for cut in cut_stages if cut < stage[node])

    held: list[list[Any]] = [
        [variable("") for _ in storages] for _ in range(phases)
    ]  # S[c]; S[phases] is never needed
    again: list[list[Any]] = [[variable("") for _ in range(count)] for _ in range(phases)]  # R[c]
    suffix: list[list[Any]] = []  # A[c]
    for c in range(phases):
        if c == phases - 1:
            suffix.append(again[c])
            continue
        suffix.append([variable("") for _ in range(count)])
        for k in range(count):
            solver.Add(suffix[c][k] <= solver.Sum([again[d][k] for d in range(c, phases)]))

    for o, (producer, _, fwd_users, bwd_users) in enumerate(storages):
        read_in = {phase_of(u) for u in bwd_users}
        last = max(read_in, default=-1)
        for c in range(phases):
            runs = [again[c]] if suffix[c] is again[c] else [again[c], suffix[c]]
            for table in runs:
                if (c in read_in) if table is again[c] else (c <= last):
                    solver.Add(held[c][o] + table[producer] >= 1)
                for u in fwd_users:
                    solver.Add(table[u] <= held[c][o] + table[producer])
            if c + 1 < phases:
                solver.Add(held[c + 1][o] <= held[c][o] + again[c][producer])

    room = (budget_bytes - outputs_bytes) / unit
    sizes = [size / unit for _, size, _, _ in storages]
    solver.Add(solver.Sum([s * x for s, x in zip(sizes, held[0], strict=True)]) <= room)
    for c, cut in enumerate(cut_stages):
        # just before the backward at the cut: held then, by keeping it or by making it in the phase
        k = problem.backward_order[cut - 1]
        node = problem.nodes[k]
        own = (node.grads_before_bytes + node.bwd_peak_bytes) / unit
        at_cut = held[c + 1]
        for o, (_, _, _, bwd_users) in enumerate(storages):
            if k in bwd_users:
                solver.Add(at_cut[o] >= 1)
        total = solver.Sum([s * x for s, x in zip(sizes, at_cut, strict=True)])
        solver.Add(total + own <= room)

    times = [node.fwd_time_ms for node in problem.nodes]
    scale = max(sum(times), 1e-9) / 1000
    solver.Minimize(
        solver.Sum([times[k] / scale * again[c][k] for c in range(phases) for k in range(count)])
    )
    status = solver.Solve()
    if status == pywraplp.Solver.INFEASIBLE:
        return math.inf
    if integer:
        value = float(solver.Objective().BestBound())
    elif status == pywraplp.Solver.OPTIMAL:
        value = float(solver.Objective().Value())
    else:
        return None
    if math.isnan(value):
        return None
    return max(0.0, value * scale * (1 - _SAFETY) - 1e-9 * scale)
