"""Planning over the chain of blocks."""

from __future__ import annotations

import pytest

from rockmate.planners.chain import chain_model
from rockmate.problems.blocks import find_cuts
from rockmate.schedules.baselines import best_segments, no_recomputation
from rockmate.schedules.simulate import simulate
from rockmate.solvers import block_solver
from zoo.problems import gpt_problem, random_problem


@pytest.mark.parametrize("merged", [False, True])
def test_every_candidate_fits_and_the_plan_is_the_fastest(merged: bool) -> None:
    problem = gpt_problem(6)
    model = chain_model(problem, block_solver("cp-sat", 0.05), merged=merged)
    assert model is not None
    peak = simulate(problem, no_recomputation(problem)).peak_bytes
    last = 0.0
    for fraction in (0.9, 0.7, 0.5):
        budget = int(fraction * peak)
        found = model.candidates(budget)
        assert found
        assert all(simulate(problem, steps).peak_bytes <= budget for steps in found)
        best = model.plan(budget)
        assert best is not None
        timeline = simulate(problem, best, budget_bytes=budget)
        assert timeline.overhead_ms <= simulate(problem, found[-1]).overhead_ms
        assert timeline.overhead_ms >= last  # less memory is never faster
        last = timeline.overhead_ms
        baseline = best_segments(problem, budget)
        if merged and baseline is not None:
            assert timeline.overhead_ms <= 1.05 * simulate(problem, baseline).overhead_ms


@pytest.mark.parametrize("seed", range(300, 330))
def test_any_graph_gives_valid_steps(seed: int) -> None:
    """Outputs in the middle, nodes without backward, several products: the steps stay valid."""
    problem = random_problem(seed, 9)
    model = chain_model(problem, block_solver("cp-sat", 0.05), merged=False)
    if model is None:
        assert find_cuts(problem) == []
        return
    peak = simulate(problem, no_recomputation(problem)).peak_bytes
    for budget in (peak, int(0.8 * peak)):
        steps = model.plan(budget)
        if steps is not None:
            simulate(problem, steps, budget_bytes=budget)
    assert model.plan(peak) is not None
