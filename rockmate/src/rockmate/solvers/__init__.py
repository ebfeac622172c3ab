"""Solvers of one problem as a whole: blocks, small graphs and windows of a plan.

Gets a problem, a budget and perhaps steps as a hint; gives a `SolverResult`. `solve_whole` below
chooses the backend. Read result.py (the result), intervals/ (CP-SAT, the default), ilp.py (the
0/1 program for CBC, HiGHS and Gurobi), bound.py (a lower bound on the time, by a linear program)
then least_budget.py (a lower bound on the budget, by cuts).
"""

from __future__ import annotations

import contextlib
import threading

from rockmate.errors import UnknownChoiceError
from rockmate.problems.problem import Problem
from rockmate.schedules.steps import Steps
from rockmate.solvers.ilp import check_installed, solve_ilp
from rockmate.solvers.result import Solver, SolverResult

BACKENDS = ("cp-sat", "cbc", "highs", "gurobi")

# The 0/1 programs are limited in seconds (CBC: of CPU time, so that a busy machine finds as much),
# because they share no measure of work.
_SECONDS_PER_UNIT = 10.0


def check_backend(backend: str) -> None:
    """Refuse a backend that is unknown or not installed; nothing is loaded.

    Raises:
        UnknownChoiceError: there is no such backend.
        SolverUnavailableError: the library of the backend is not installed.
    """
    if backend not in BACKENDS:
        raise UnknownChoiceError("backend", backend, BACKENDS)
    check_installed(backend)


def solve_whole(
    problem: Problem,
    budget_bytes: int,
    *,
    backend: str = "cp-sat",
    hint: Steps | None = None,
    deterministic_limit: float = 1.0,
    unhinted_limit: float | None = None,
    wall_limit_s: float | None = None,
    seed: int = 0,
) -> SolverResult:
    """Return the best steps that a backend finds for a problem within the budget.

    `unhinted_limit` replaces CP-SAT's limit if it cannot start from the hint.

    Raises:
        UnknownChoiceError: there is no such backend.
        SolverUnavailableError: the backend is not installed or not licensed for this size.
    """
    if backend == "cp-sat":
        from rockmate.solvers.intervals.solve import solve_intervals

        return solve_intervals(
            problem,
            budget_bytes,
            hint=hint,
            deterministic_limit=deterministic_limit,
            unhinted_limit=unhinted_limit,
            wall_limit_s=wall_limit_s,
            seed=seed,
        )
    check_backend(backend)
    seconds = _SECONDS_PER_UNIT * deterministic_limit
    limit = seconds if wall_limit_s is None else min(seconds, wall_limit_s)
    return solve_ilp(problem, budget_bytes, backend=backend, time_limit_s=max(1.0, limit))


def block_solver(backend: str, deterministic_limit: float) -> Solver:
    """Return a backend as the solver of a block's boxes; many threads may call it.

    The 0/1 programs are solved one at a time: their limit is in seconds, and the libraries do not
    promise to be thread-safe.
    """
    turn = contextlib.nullcontext() if backend == "cp-sat" else threading.Lock()

    def solve(problem: Problem, budget_bytes: int, hint: Steps) -> SolverResult:
        with turn:
            return solve_whole(
                problem,
                budget_bytes,
                backend=backend,
                hint=hint,
                deterministic_limit=deterministic_limit,
            )

    return solve
