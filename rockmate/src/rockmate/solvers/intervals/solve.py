"""Retention intervals on CP-SAT: the default solver of blocks, whole graphs and windows of a plan.

Time is a line of integers. With n nodes and W = n + 1, the first forward of node k is at time k;
stage s (the recomputations before the s-th backward, then that backward) covers [s*W, (s+1)*W):
node k can be run again at s*W + k, and the backward is at s*W + n. So recomputations of one stage
keep the order of the nodes, and each node runs at most once per stage.

* run i of node k: run 0 is fixed; later runs are optional, with a variable stage;
* storage o of run i: an interval from the run's start to a free end, present with the run; a run
  replaces what earlier runs of its node made, so their intervals end before it;
* a reader at time t needs one run of the producer that starts before t and whose interval ends
  after t; a phantom has its producer's backward as reader, and exactly one run makes it;
* all intervals, the workspace of each step, the gradients of each stage and the rerun states share
  one cumulative resource: the budget.

The number of variables is O(n · runs), not O(n²) as in the programs over time × nodes. After
MOCCASIN (Bartan et al. 2023), with the backward order fixed, phantoms, workspaces and rerun state.

A *window* frees only some nodes, in some stages, of an incumbent plan; everything else is a fixed
background. In this way plans of networks that are too large for one program are improved.

`runs` says when each node may run, `demands` which memory that takes, `memory` how the memory is
bounded. Here they are put together and solved.
"""

from __future__ import annotations

import time
from typing import Any

from rockmate.problems.problem import Problem
from rockmate.schedules.steps import Steps
from rockmate.solvers.intervals.cp_sat import cp_model
from rockmate.solvers.intervals.demands import Demands
from rockmate.solvers.intervals.memory import CumulativeMemory
from rockmate.solvers.intervals.runs import TimeAxis, Window
from rockmate.solvers.result import SolverResult, Status, recomputed_ms

__all__ = ["Window", "solve_intervals"]

_SMALL_NODES = 16  # graphs of at most this many nodes are solved without presolve
_HINT_LIMIT = 0.02  # deterministic seconds
_COST_RANGE = 10_000_000  # integer costs add up to about this


def solve_intervals(
    problem: Problem,
    budget_bytes: int,
    *,
    max_runs: int = 3,
    objective: str = "time",
    hint: Steps | None = None,
    window: Window | None = None,
    deterministic_limit: float = 5.0,
    unhinted_limit: float | None = None,
    wall_limit_s: float | None = None,
    seed: int = 0,
) -> SolverResult:
    """Return the best steps found whose peak is at most the budget.

    The result is deterministic without a wall-clock limit: there is one worker.
    `deterministic_limit` counts work, one unit being about a second. `unhinted_limit` replaces it
    if the hint is no schedule of this class: a node runs too often, or rounded sizes do not fit.
    `objective="peak"` minimises the peak instead of the time.

    For speed, there is no linear relaxation. Level 2 of it costs more than its bounds gain: 2.6 to
    7 times the seconds on whole graphs of 26 to 56 nodes. Level 1 makes no difference there. Also
    for speed, probing, symmetry detection and dual heuristics are off, and presolve is one round;
    small graphs are solved without it.
    """
    sat = cp_model()

    begin = time.perf_counter()
    program = _IntervalProgram(problem, budget_bytes, max_runs, objective, window, hint)
    if program.hopeless:
        return SolverResult("infeasible", seconds=time.perf_counter() - begin)
    solver = _new_solver(seed)
    parameters = solver.parameters
    # There are many small programs. Presolve took most of their time, and a linear relaxation slows
    # models with workspaces and phantoms down (blocks took 2.7 times and 4 times as long).
    parameters.linearization_level = 0
    parameters.cp_model_probing_level = 0
    parameters.symmetry_level = 0
    parameters.max_presolve_iterations = 1
    # 100 boxes of blocks with 8 to 16 nodes took 4.4 s with presolve and 3.2 s without.
    parameters.cp_model_presolve = len(problem.nodes) > _SMALL_NODES
    # Windows of four networks took 36 s with them and 33 s without, for the same plans.
    parameters.use_dual_scheduling_heuristics = False
    parameters.max_deterministic_time = deterministic_limit
    if wall_limit_s is not None:
        parameters.max_time_in_seconds = max(0.05, wall_limit_s)
    if unhinted_limit is not None and not _takes_hint(program.cp, seed):
        if not unhinted_limit:
            return SolverResult("unknown", seconds=time.perf_counter() - begin)
        parameters.max_deterministic_time = unhinted_limit
    code = solver.solve(program.cp)
    seconds = time.perf_counter() - begin
    if code == sat.INFEASIBLE:
        return SolverResult("infeasible", seconds=seconds)
    if code not in (sat.OPTIMAL, sat.FEASIBLE):
        return SolverResult("unknown", seconds=seconds)
    found = program.line.read(solver)
    status: Status = "optimal" if code == sat.OPTIMAL else "feasible"
    value = program.to_objective(solver.objective_value)
    if objective == "time":
        value = recomputed_ms(problem, found)  # exact; the program's costs are rounded
    return SolverResult(status, found, value, seconds)


def _new_solver(seed: int) -> Any:
    sat = cp_model()

    solver = sat.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.catch_sigint_signal = False  # leaves Ctrl-C to Python
    return solver


def _takes_hint(program: Any, seed: int) -> bool:
    """Return whether the hint of a program is a solution, or is quickly completed to one."""
    sat = cp_model()

    solver = _new_solver(seed)
    solver.parameters.cp_model_presolve = False
    solver.parameters.fix_variables_to_their_hinted_value = True
    solver.parameters.stop_after_first_solution = True
    solver.parameters.max_deterministic_time = _HINT_LIMIT
    return solver.solve(program) in (sat.OPTIMAL, sat.FEASIBLE)


class _IntervalProgram:
    """The constraint program of a problem, and the units of its objective."""

    def __init__(
        self,
        problem: Problem,
        budget_bytes: int,
        max_runs: int,
        objective: str,
        window: Window | None,
        hint: Steps | None,
    ) -> None:
        sat = cp_model()

        self.cp = sat.CpModel()
        self.line = TimeAxis(problem, self.cp, max_runs, window, hint)
        self._problem = problem
        self._minimise_peak = objective == "peak"
        self._memory = CumulativeMemory(self.line, budget_bytes)
        demands = Demands(self.line, self._memory)
        demands.add_storages()
        demands.add_workspaces()
        self._memory.close()
        self.hopeless = self._memory.hopeless
        peak = self._memory.add_capacity(minimise_peak=self._minimise_peak)
        if self._minimise_peak:
            self.cp.minimize(peak)
        else:
            self._minimise_time()

    def _minimise_time(self) -> None:
        times = [node.fwd_time_ms for node in self._problem.nodes]
        self._scale = _COST_RANGE / max(sum(times), 1e-9)
        terms = []
        for k, runs in enumerate(self.line.runs):
            cost = max(1, round(times[k] * self._scale))
            terms += [cost * run.present for run in runs if not run.fixed]
        self._fixed_ms = sum(
            times[k] * (sum(run.fixed for run in runs) - 1) for k, runs in enumerate(self.line.runs)
        )
        self.cp.minimize(sum(terms))

    def to_objective(self, value: float) -> float:
        """Return bytes or milliseconds for a value of the program's objective."""
        if self._minimise_peak:
            return value * self._memory.unit_bytes
        return self._fixed_ms + value / self._scale
