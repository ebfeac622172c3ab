"""The 0/1 program with CBC: exact on small graphs, honest about time limits."""

from __future__ import annotations

import pytest

from oracles.best_plan import exhaustive_search
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.simulate import simulate
from rockmate.solvers.ilp import solve_ilp
from zoo.problems import gpt_problem, random_problem


@pytest.mark.parametrize("seed", range(40))
def test_equals_exhaustive_search_of_its_class(seed: int) -> None:
    problem = random_problem(seed, 2 + seed % 5)
    peak = simulate(problem, no_recomputation(problem)).peak_bytes
    for budget in (9 * peak // 10, 3 * peak // 4, 3 * peak // 5):
        oracle = exhaustive_search(problem, budget, ascending=True)
        result = solve_ilp(problem, budget)
        if oracle is None:
            assert result.status == "infeasible"
            assert result.steps is None
        else:
            assert result.status == "optimal"
            assert result.objective == pytest.approx(oracle[0])
            simulate(problem, result.steps, budget_bytes=budget)


def test_a_time_limit_is_not_called_optimal() -> None:
    problem = gpt_problem(3)
    budget = int(0.7 * simulate(problem, no_recomputation(problem)).peak_bytes)
    result = solve_ilp(problem, budget, time_limit_s=1)
    assert result.status in ("feasible", "unknown")
