"""Pieces that keep more where there is room: which, how much, and never over the budget."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

from rockmate import planners
from rockmate.errors import InfeasibleBudgetError
from rockmate.networks.keeping import Keeping
from rockmate.problems.problem import Node, Problem, Storage
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.plan import Plan, make_plan
from rockmate.schedules.simulate import simulate

KINDS = ("wide", "narrow", "wide", "narrow", "even", "")
MORE_BYTES = {"wide": 100, "narrow": 20, "even": 10}
GAIN_MS = {"wide": 2.0, "narrow": 1.0, "even": 0.0}


def problem_with(kept: Collection[int]) -> Problem:
    """Return a chain of which some nodes keep more for a faster backward."""
    nodes, storages = [], []
    for i, kind in enumerate(KINDS):
        more = i in kept
        nodes.append(Node(f"n{i}", 1.0, 5.0 - (GAIN_MS[kind] if more else 0.0)))
        users = (i + 1,) if i + 1 < len(KINDS) else ()
        storages.append(Storage(f"s{i}", 10, i, users, users, is_output=not users))
        if more:
            storages.append(Storage(f"p{i}", MORE_BYTES[kind], i, (), (i,), is_phantom=True))
    return Problem(tuple(nodes), tuple(storages))


class OfAChain(Keeping):
    """Networks that are problems only."""

    def _with(self, nodes: Collection[int]) -> Any:
        return SimpleNamespace(problem=problem_with(nodes), kept=frozenset(nodes))


def keeping() -> Keeping:
    compiled = SimpleNamespace(classes=KINDS, keeping=dict.fromkeys(range(5)))
    network: Any = SimpleNamespace(problem=problem_with(()), kept=frozenset(), compiled=compiled)
    measured: Any = None
    return OfAChain(network, measured, {})


def plan_within(spare_bytes: int) -> Plan:
    problem = problem_with(())
    steps = no_recomputation(problem)
    budget = simulate(problem, steps).peak_bytes + spare_bytes
    return make_plan(problem, steps, budget, "none")


@pytest.mark.parametrize(
    ("spare_bytes", "kept"),
    [
        (1000, {0, 1, 2, 3}),  # what gains nothing keeps nothing
        (0, set()),
        (40, {1, 3}),  # one kind, which gains more for its bytes
        (20, {3}),  # one node of it: the last, which keeps for the shortest time
        (150, {1, 2, 3}),
    ],
)
def test_what_gains_most_for_its_bytes_keeps_more(spare_bytes: int, kept: set[int]) -> None:
    plan = plan_within(spare_bytes)
    kept_by_none = keeping()
    network, found = kept_by_none.filled(kept_by_none.network, plan)
    assert network.kept == kept
    gain_ms = sum(GAIN_MS[KINDS[i]] for i in kept)
    assert found.time_ms == plan.time_ms - gain_ms
    assert found.peak_bytes == simulate(problem_with(kept), plan.steps).peak_bytes
    assert found.peak_bytes <= plan.budget_bytes
    assert found.steps == plan.steps
    found.check(problem_with(kept))


@pytest.mark.parametrize("spare_bytes", [-20, -10, 0, 10, 20, 60, 100, 140])
def test_plans_in_which_some_keep_more_from_the_start_are_tried(spare_bytes: int) -> None:
    problem = problem_with(())
    budget = simulate(problem, no_recomputation(problem)).peak_bytes + spare_bytes

    def planner(of: Problem) -> Plan:
        return planners.plan(of, budget)

    def best_of(kept: Collection[int]) -> float:
        try:
            return planner(problem_with(kept)).time_ms
        except InfeasibleBudgetError:
            return float("inf")

    pieces = keeping()
    plan = planner(problem)
    network, found = pieces.chosen(plan, planner)
    found.check(problem_with(network.kept))
    assert found.peak_bytes <= budget
    assert found.time_ms <= pieces.filled(pieces.network, plan)[1].time_ms
    subsets = (set(some) for count in range(5) for some in combinations(range(4), count))
    least_ms = min(map(best_of, subsets))
    assert least_ms <= found.time_ms <= 1.1 * least_ms
