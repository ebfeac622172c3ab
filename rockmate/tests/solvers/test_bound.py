"""The certificate: never above the true optimum, and tight on long chains."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from oracles.best_plan import exhaustive_search
from rockmate.planners import plan
from rockmate.problems.problem import Problem
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.simulate import simulate
from rockmate.solvers.bound import _solve, lower_bound
from zoo.problems import gpt_problem, random_problem


@pytest.mark.parametrize("seed", range(500, 560))
def test_never_above_the_optimum_of_all_schedules(seed: int) -> None:
    problem = random_problem(seed, 2 + seed % 4)
    peak = simulate(problem, no_recomputation(problem)).peak_bytes
    for budget in (9 * peak // 10, 3 * peak // 4, 3 * peak // 5, peak // 2):
        oracle = exhaustive_search(problem, budget, in_forward=True)
        for cuts in (0, 2):
            bound = lower_bound(problem, budget, cuts=cuts)
            if oracle is None:
                assert bound >= 0
            else:
                assert bound <= oracle[0] + 1e-9


def in_bytes(problem: Problem, draw: random.Random) -> Problem:
    """Return a problem with sizes and times as they are measured."""

    def size(small: int) -> int:
        return small and small * draw.randint(10**5, 10**8) + draw.randint(0, 999)

    nodes = (
        replace(
            node,
            fwd_time_ms=node.fwd_time_ms * draw.uniform(0.001, 4),
            fwd_peak_bytes=size(node.fwd_peak_bytes),
            fwd_peak_nograd_bytes=size(node.fwd_peak_nograd_bytes or 0),
            bwd_peak_bytes=size(node.bwd_peak_bytes),
            grads_before_bytes=size(node.grads_before_bytes),
        )
        for node in problem.nodes
    )
    storages = (replace(s, size_bytes=size(s.size_bytes)) for s in problem.storages)
    return Problem(tuple(nodes), tuple(storages))


@pytest.mark.parametrize("seed", range(16))
def test_never_above_a_schedule_that_just_fits(seed: int) -> None:
    """Solvers scale rows and times to integers, here of large sizes without room to spare."""
    problem = in_bytes(random_problem(seed, 2 + seed % 4, states=False), random.Random(seed))
    peak = simulate(problem, no_recomputation(problem)).peak_bytes
    fitting = [exhaustive_search(problem, int(part * peak)) for part in (0.9, 0.75, 0.6)]
    for _, steps in filter(None, fitting):
        budget = simulate(problem, steps).peak_bytes
        oracle = exhaustive_search(problem, budget, in_forward=True)
        assert oracle is not None
        assert lower_bound(problem, budget) <= oracle[0] + 1e-9
        for stages in ((), (1,), tuple(range(1, len(problem.backward_order) + 1))):
            bound = _solve(problem, budget, stages, integer=True)
            assert (bound or 0.0) <= oracle[0] + 1e-9


def test_some_budgets_are_proven_infeasible_and_some_bounds_are_exact() -> None:
    proven = exact = 0
    for seed in range(40):
        problem = random_problem(seed, 5)
        peak = simulate(problem, no_recomputation(problem)).peak_bytes
        for budget in (3 * peak // 4, 3 * peak // 5):
            oracle = exhaustive_search(problem, budget)
            bound = lower_bound(problem, budget)
            proven += oracle is None and bound == math.inf
            exact += oracle is not None and oracle[0] > 0 and bound >= 0.999 * oracle[0]
    assert proven >= 20
    assert exact >= 10


def test_long_chains_are_planned_close_to_the_bound() -> None:
    problem = gpt_problem(12)
    peak = simulate(problem, no_recomputation(problem)).peak_bytes
    found = plan(problem, int(0.6 * peak), effort="fast")
    assert found.gap is not None
    assert 0 < found.gap < 0.01


def test_more_cuts_never_weaken_the_bound() -> None:
    problem = gpt_problem(6)
    peak = simulate(problem, no_recomputation(problem)).peak_bytes
    bounds = [lower_bound(problem, int(0.4 * peak), cuts=cuts) for cuts in (0, 1, 2)]
    assert bounds == sorted(bounds)
    assert bounds[1] > 1.2 * bounds[0]
