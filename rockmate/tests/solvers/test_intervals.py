"""Retention intervals: exact on small graphs, windows, hints, peaks, determinism."""

from __future__ import annotations

import subprocess
import sys

import pytest

from oracles.best_plan import exhaustive_search
from rockmate.planners.windows import improve, in_node_order
from rockmate.schedules.baselines import best_segments, no_recomputation
from rockmate.schedules.prune import prune
from rockmate.schedules.simulate import simulate
from rockmate.solvers.intervals.solve import Window, solve_intervals
from zoo.problems import gpt_problem, random_problem, unet_problem


def budgets(problem, *fractions):
    peak = simulate(problem, no_recomputation(problem)).peak_bytes
    return [int(peak * fraction) for fraction in fractions]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("runs", [2, 9])
def test_equals_exhaustive_search_of_its_class(seed: int, runs: int) -> None:
    problem = random_problem(seed, 2 + seed % 4)
    for budget in budgets(problem, 0.9, 0.75, 0.6):
        oracle = exhaustive_search(problem, budget, ascending=True, max_runs=runs)
        result = solve_intervals(problem, budget, max_runs=runs)
        if oracle is None:
            assert result.status == "infeasible"
            continue
        assert result.status == "optimal"
        assert result.objective == pytest.approx(oracle[0])
        simulate(problem, result.steps, budget_bytes=budget)
        hinted = solve_intervals(problem, budget, max_runs=runs, hint=oracle[1])
        assert hinted.objective == pytest.approx(oracle[0])


@pytest.mark.parametrize("seed", range(100, 130))
def test_least_peak_is_the_smallest_feasible_budget(seed: int) -> None:
    problem = random_problem(seed, 2 + seed % 4)
    (peak,) = budgets(problem, 1)
    result = solve_intervals(problem, peak, max_runs=9, objective="peak")
    assert result.status == "optimal"
    reached = simulate(problem, result.steps).peak_bytes
    assert reached == result.objective
    assert exhaustive_search(problem, reached, ascending=True) is not None
    assert exhaustive_search(problem, reached - 1, ascending=True) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_window_over_everything_is_the_whole_problem(seed: int) -> None:
    problem = random_problem(seed, 5)
    for budget in budgets(problem, 0.75):
        oracle = exhaustive_search(problem, budget, ascending=True, max_runs=9)
        if oracle is None:
            continue
        steps = oracle[1]
        stages = len(problem.backward_order)
        for nodes in (range(5), range(2), range(2, 5)):
            window = Window(steps, frozenset(nodes), 1, stages)
            result = solve_intervals(problem, budget, window=window, max_runs=9)
            assert result.status == "optimal"
            assert result.objective == pytest.approx(oracle[0])
            simulate(problem, result.steps, budget_bytes=budget)


def test_memory_in_units_stays_within_the_budget() -> None:
    problem = unet_problem(3)
    for budget in budgets(problem, 0.7):
        budget -= 3  # no multiple of anything
        result = solve_intervals(problem, budget, deterministic_limit=0.2)
        assert simulate(problem, result.steps).peak_bytes <= budget


def test_windows_improve_a_plan_and_are_deterministic() -> None:
    problem = gpt_problem(6)
    (budget,) = budgets(problem, 0.5)
    start = best_segments(problem, budget)
    assert start is not None
    first = improve(problem, start, budget, windows=6, window_limit=0.02)
    again = improve(problem, start, budget, windows=6, window_limit=0.02)
    assert first == again
    before, after = simulate(problem, start), simulate(problem, first)
    assert after.peak_bytes <= budget
    assert after.overhead_ms < before.overhead_ms


def test_node_order_keeps_what_is_recomputed() -> None:
    problem = gpt_problem(6)
    (budget,) = budgets(problem, 0.5)
    steps = best_segments(problem, budget)
    assert steps is not None
    ordered = in_node_order(problem, steps)
    assert sorted(ordered) == sorted(steps)
    assert prune(problem, ordered, budget) == ordered


_ASKS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from rockmate.solvers.intervals.cp_sat import cp_model
sys.setswitchinterval(1e-6)
with ThreadPoolExecutor(8) as pool:  # as blocks are solved
    asked = [pool.submit(lambda: (cp_model().CpModel, cp_model())) for _ in range(8)]
    sat, *others = [future.result()[1] for future in asked]
assert all(other is sat for other in others)
before = "pandas" in sys.modules
from ortools.sat.python import cp_model as known
model = sat.CpModel()
x = model.new_int_var(0, 5, "x")
model.add(x >= 3)
model.minimize(x)
solver = sat.CpSolver()
solver.solve(model)
print(before, known is sat, solver.value(x), sat.pd.Index.__module__.split(".")[0])
"""


def test_one_module_is_loaded_and_pandas_where_it_is_asked_for() -> None:
    # A process of its own: in this one, pandas may be there.
    ran = subprocess.run([sys.executable, "-c", _ASKS], check=True, capture_output=True, text=True)
    assert ran.stdout.split() == ["False", "True", "3", "pandas"]
