"""The lower bound on the smallest budget: true for every schedule, and near plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.best_plan import exhaustive_search
from rockmate.errors import InfeasibleBudgetError
from rockmate.planners.portfolio import plan
from rockmate.planners.smallest_budget import minimum_peak
from rockmate.problems.link import Link
from rockmate.problems.problem import Problem
from rockmate.solvers.least_budget import floor_bytes, least_budget
from zoo.problems import NetworkBuilder, random_problem


def perceptrons(layers: int) -> Problem:
    """Layers of x + w2(gelu(w1(norm(x)))), whose middle is four times as wide."""
    net = NetworkBuilder()
    x = net.add("embedding", [], 100, flops=1)
    for _ in range(layers):
        norm = net.add("norm", [x], 100, flops=1)
        wide = net.add("linear", [norm], 400, flops=4)
        bent = net.add("gelu", [wide], 400, flops=1)
        x = net.add("linear and sum", [bent, x], 100, flops=4)
    return net.build([net.add("loss", [x], 4, flops=1)])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(2, 6), work=st.sampled_from([300, 10**6]))
def test_no_schedule_is_below_it(seed: int, count: int, work: int) -> None:
    problem = random_problem(seed, count)
    bound = least_budget(problem, minimum_peak(problem)[1], work=work)
    assert bound >= floor_bytes(problem)
    assert exhaustive_search(problem, bound - 1, in_forward=True) is None


def test_it_is_above_the_need_of_single_steps_on_small_problems() -> None:
    better = exact = 0
    for seed in range(30):
        problem = random_problem(seed, 2 + seed % 5)
        bound = least_budget(problem, minimum_peak(problem)[1])
        better += bound > floor_bytes(problem)
        exact += exhaustive_search(problem, bound) is not None
    assert better >= 4
    assert exact >= 20


@pytest.mark.parametrize("layers", [3, 12])
def test_what_is_carried_to_an_earlier_layer_is_found(layers: int) -> None:
    problem = perceptrons(layers)
    peak = minimum_peak(problem)[1]
    assert floor_bytes(problem) < 0.96 * peak
    assert least_budget(problem, peak) >= 0.99 * peak


def test_what_may_be_elsewhere_is_not_held() -> None:
    problem = perceptrons(4)
    peak = minimum_peak(problem)[1]
    storages = tuple(replace(s, is_movable=not s.is_output) for s in problem.storages)
    moving = replace(problem, storages=storages, link=Link(1e3, 1e3))
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(moving, floor_bytes(problem) - 1)
    assert caught.value.bound_bytes < least_budget(problem, peak)
