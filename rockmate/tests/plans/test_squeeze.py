"""Plans of least memory: always within their limit, mostly at the least on small graphs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.best_plan import exhaustive_search
from rockmate.planners.smallest_budget import low_memory_plan, minimum_peak
from rockmate.planners.squeeze import Squeezer, squeeze
from rockmate.problems.problem import Problem
from rockmate.schedules.simulate import simulate
from rockmate.solvers.least_budget import floor_bytes, least_budget
from zoo.problems import NetworkBuilder, gpt_problem, random_problem, unet_problem


def squeezed_bytes(problem: Problem) -> int:
    high = low_memory_plan(problem)[1]
    steps = squeeze(problem, floor_bytes(problem), high)
    return high if steps is None else min(high, simulate(problem, steps).peak_bytes)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(2, 30), part=st.floats(0.0, 1.0))
def test_what_is_found_to_fit_fits(seed: int, count: int, part: float) -> None:
    problem = random_problem(seed, count)
    low, high = floor_bytes(problem), low_memory_plan(problem)[1]
    limit = int(low + part * (high - low))
    squeezer = Squeezer(problem)
    needs = squeezer.carried(limit)
    if needs is not None:
        assert simulate(problem, squeezer.follow(needs, limit)).peak_bytes <= limit


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(2, 6))
def test_never_below_the_truth_and_near_it(seed: int, count: int) -> None:
    problem = random_problem(seed, count)
    found = squeezed_bytes(problem)
    assert exhaustive_search(problem, found, in_forward=True) is not None
    assert exhaustive_search(problem, int(found / 1.6), ascending=True, max_runs=3) is None


def test_mostly_the_least_on_small_graphs() -> None:
    exact = 0
    for seed in range(400, 430):
        problem = random_problem(seed, 2 + seed % 5)
        least = squeezed_bytes(problem) - 1
        exact += exhaustive_search(problem, least, ascending=True, max_runs=3) is None
    assert exact >= 25


@pytest.mark.parametrize(
    "problem", [gpt_problem(12), unet_problem()], ids=["gpt of 12 layers", "unet"]
)
def test_near_what_one_step_needs_on_networks(problem: Problem) -> None:
    assert squeezed_bytes(problem) <= 1.05 * floor_bytes(problem)


def test_a_sum_is_made_again_from_nothing_beside_a_large_value() -> None:
    """Attention and perceptrons: where a wide value is bent, what is added later is not there."""
    net = NetworkBuilder()
    x = net.add("embedding", [], 60, saves="")
    for _ in range(2):
        q, k, v = (net.add("linear", [x], 60) for _ in range(3))
        q, k = (net.add("scaled", [part], 60, workspace_bytes=60, saves="") for part in (q, k))
        scores = net.add("softmax", [net.add("product", [q, k], 40)], 40, saves="o")
        x = net.add("sum", [net.add("product", [scores, v], 60, workspace_bytes=60), x], 60)
        wide = net.add("linear", [x], 240)
        x = net.add("sum", [net.add("gelu", [wide], 240), x], 60, saves="i")
    problem = net.build([net.add("loss", [x], 4)])
    steps, peak = minimum_peak(problem)
    assert simulate(problem, steps).peak_bytes <= peak <= 1.01 * least_budget(problem, peak)
