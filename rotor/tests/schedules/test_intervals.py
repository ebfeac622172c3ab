"""Schedules that drop what they stored: exact on tiny chains, and never kept when worse."""

import random
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oracles.best_schedule import exhaustive_search
from rotor import InfeasibleBudgetError, Schedule, simulate, solve, solve_table
from rotor.schedules.ops import B, Fc, Fe, Fn
from rotor.solver.intervals import (
    MAX_STAGES,
    METHOD,
    IntervalsUnavailableError,
    _run_late,
    improve_with_intervals,
    solve_intervals,
)
from zoo.chains import chains, random_chain

pytest.importorskip("ortools", reason="the extra 'intervals' is not installed")

INFINITY = float("inf")


@given(chains(4, options=2, largest=5), st.integers(-2, 4))
def test_equal_to_the_unrestricted_search(chain, above):
    budget = max(1, solve_table(chain, 1).smallest_feasible_bytes + above)
    best = exhaustive_search(chain, budget, persistent=False)
    try:
        found = solve_intervals(chain, budget)
    except InfeasibleBudgetError:
        assert best is None
        return
    assert best is not None
    assert found.makespan_ms == best[0]
    assert simulate(chain, found.ops).peak_bytes <= budget


def test_it_can_beat_the_recurrence_and_the_plan_says_so():
    """Searches tiny chains for one where dropping helps: there are some, in time or in memory."""
    faster = feasible = 0
    for seed in range(1200):
        chain = random_chain(random.Random(seed), 4, options=2, largest=5)
        least = solve_table(chain, 1).smallest_feasible_bytes
        for budget in (least - 1, least, least + 1):
            best = exhaustive_search(chain, budget, persistent=False)
            if best is None:
                continue
            try:
                dp = solve(chain, budget)
            except InfeasibleBudgetError:
                dp = None
            if dp is not None and dp.makespan_ms <= best[0]:
                continue
            better = improve_with_intervals(chain, budget, dp)
            assert better is not None
            assert better.method == METHOD
            assert better.makespan_ms == best[0]
            faster += dp is not None
            feasible += dp is None
        if faster + feasible >= 2:
            break
    assert faster + feasible >= 2


@settings(max_examples=15)
@given(chains(14, options=2, largest=50), st.floats(1.0, 1.6))
@example(random_chain(random.Random(8), 11, options=2, largest=50), 1.0625)  # had an idle run
def test_the_better_one_is_kept(chain, factor):
    budget = int(factor * max(1, solve_table(chain, 1).smallest_feasible_bytes))
    schedule = solve(chain, budget, slots=200)
    better = improve_with_intervals(chain, budget, schedule, effort=0.2)
    assert better.makespan_ms <= schedule.makespan_ms
    assert better.peak_bytes <= budget
    assert better.method == METHOD or better is schedule


def test_inputs_are_kept_where_the_executor_needs_them():
    """Without forgetting inputs, every schedule keeps what it did, and never gets faster."""
    forgotten = 0
    for seed in range(40):
        chain = random_chain(random.Random(seed), 5, options=2, largest=6)
        budget = solve_table(chain, 1).smallest_feasible_bytes
        keeping = solve_intervals(chain, budget, forget_inputs=False)
        free = solve_intervals(chain, budget)
        assert "Fe*" not in str(keeping)
        assert free.makespan_ms <= keeping.makespan_ms
        forgotten += "Fe*" in str(free)
    assert forgotten > 0


def test_what_runs_again_does_so_as_late_as_memory_allows():
    chain = random_chain(random.Random(0), 3)
    early = [Fc(0), Fn(1), Fe(2), Fe(0), B(2), Fe(1), B(1), B(0)]
    late = [Fc(0), Fn(1), Fe(2), B(2), Fe(0), Fe(1), B(1), B(0)]
    schedule = Schedule.from_ops(chain, early, METHOD)
    assert list(_run_late(chain, schedule, schedule.peak_bytes).ops) == late
    assert list(_run_late(chain, schedule, 0).ops) == early


def test_same_answer_every_time():
    chain = random_chain(random.Random(6), 12, largest=40)
    budget = solve_table(chain, 1).smallest_feasible_bytes + 20
    assert solve_intervals(chain, budget) == solve_intervals(chain, budget)


def test_long_chains_and_plans_without_recomputation_are_left_alone():
    long_chain = random_chain(random.Random(1), MAX_STAGES + 1)
    budget = solve_table(long_chain, 1).smallest_feasible_bytes + 5
    schedule = solve(long_chain, budget)
    assert improve_with_intervals(long_chain, budget, schedule) is schedule
    short = random_chain(random.Random(1), 5)
    free = solve(short, 10**6)
    assert improve_with_intervals(short, 10**6, free) is free


def test_without_ortools_the_recurrence_stands_and_asking_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    chain = random_chain(random.Random(3), 5)
    budget = solve_table(chain, 1).smallest_feasible_bytes
    schedule = solve(chain, budget)
    assert improve_with_intervals(chain, budget, schedule) is schedule
    with pytest.raises(IntervalsUnavailableError, match=r"rk-rotor\[intervals\]"):
        solve_intervals(chain, budget)


def test_an_infeasible_budget_is_an_error_with_the_smallest_known():
    chain = random_chain(random.Random(3), 5)
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve_intervals(chain, 1)
    assert caught.value.minimum_bytes == solve_table(chain, 1).smallest_feasible_bytes
