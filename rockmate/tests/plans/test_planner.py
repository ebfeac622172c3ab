"""plan(): budgets kept or refused, determinism, planners by name, efforts."""

from __future__ import annotations

import dataclasses

import pytest

from oracles.best_plan import exhaustive_search
from rockmate.errors import InfeasibleBudgetError, SolverError
from rockmate.planners import EFFORTS, PLANNERS, minimum_peak, plan, portfolio, search
from rockmate.planners.search import Search
from rockmate.problems.problem import Problem
from rockmate.schedules.baselines import checkpoint_segments, no_recomputation
from rockmate.schedules.simulate import simulate
from rockmate.solvers import solve_whole
from zoo.problems import gpt_problem, random_problem, resnet_problem, unet_problem


def keeping_all(problem: Problem) -> int:
    return simulate(problem, no_recomputation(problem)).peak_bytes


NETWORKS = {"gpt": gpt_problem(5), "resnet": resnet_problem((1, 2, 1)), "unet": unet_problem(3)}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_within_their_budgets(name: str) -> None:
    problem = NETWORKS[name]
    whole = keeping_all(problem)
    last = -1.0
    for fraction in (1.0, 0.6):
        found = plan(problem, int(fraction * whole), effort="fast")
        found.check(problem)
        assert found.peak_bytes <= found.budget_bytes
        assert found.overhead_ms == simulate(problem, found.steps).overhead_ms
        assert found.gap is not None
        assert found.gap < 0.04
        assert found.overhead_ms > last
        last = found.overhead_ms
    assert plan(problem, whole).status == "optimal"


@pytest.mark.parametrize("seed", range(400, 430))
def test_the_smallest_budget_works_and_one_byte_less_is_refused(seed: int) -> None:
    problem = random_problem(seed, 2 + seed % 5)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(problem, 1, effort="fast")
    least = caught.value.minimum_bytes
    assert caught.value.asked_bytes == 1
    assert plan(problem, least, effort="fast").peak_bytes <= least
    with pytest.raises(InfeasibleBudgetError, match=f"at least {least} bytes"):
        plan(problem, least - 1, effort="fast")
    # and it is the truth, up to schedules outside the solvers' class
    assert exhaustive_search(problem, least, in_forward=True) is not None
    assert exhaustive_search(problem, least - 1, ascending=True, max_runs=3) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_the_smallest_budget_of_networks_ignores_times(name: str) -> None:
    problem = NETWORKS[name]
    steps, least = minimum_peak(problem)
    assert simulate(problem, steps).peak_bytes <= least < 0.5 * keeping_all(problem)
    scrambled = dataclasses.replace(
        problem,
        nodes=tuple(
            dataclasses.replace(node, fwd_time_ms=1.0 + (7 * k) % 5)
            for k, node in enumerate(problem.nodes)
        ),
    )
    assert minimum_peak(scrambled) == (steps, least)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(scrambled, least - 1, effort="fast")
    assert caught.value.minimum_bytes == least
    assert plan(scrambled, least, effort="fast").peak_bytes <= least


def test_the_refusal_names_the_node() -> None:
    with pytest.raises(InfeasibleBudgetError, match=r"of \w+ in module '(loss|head|blocks)"):
        plan(NETWORKS["gpt"], 1000)


@pytest.mark.slow
def test_two_plannings_agree() -> None:
    problem = gpt_problem(2)
    budget = int(0.7 * keeping_all(problem))
    first = plan(problem, budget, effort="fast")
    assert plan(problem, budget, effort="fast").steps == first.steps


@pytest.mark.parametrize("planner", PLANNERS)
def test_planners_by_name(planner: str) -> None:
    problem = gpt_problem(2)
    whole = keeping_all(problem)
    budget = whole if planner == "none" else int(0.9 * whole)
    found = plan(problem, budget, planner=planner, effort="fast")
    assert found.peak_bytes <= budget
    found.check(problem)


def test_the_published_planners() -> None:
    assert " ".join(PLANNERS) == (
        "auto none recompute_all chen segments rotor rockmate checkmate intervals search"
    )


def test_a_new_planner_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = gpt_problem(2)
    budget = int(0.9 * keeping_all(problem))

    def every_third(run: Search) -> None:
        borders = range(3, len(problem.nodes), 3)
        run.attempt("every third", lambda: checkpoint_segments(problem, borders))

    with pytest.raises(ValueError, match="planner 'mine' is unknown"):
        plan(problem, budget, planner="mine")
    monkeypatch.setitem(PLANNERS, "mine", every_third)
    found = plan(problem, budget, planner="mine")
    assert found.planner == "every third"
    assert [trial.planner for trial in found.tried] == ["every third"]
    found.check(problem)


@pytest.mark.parametrize("planner", ["checkmate", "intervals"])
def test_a_solver_of_whole_graphs_may_find_what_was_known(planner: str) -> None:
    """The plan that shows the budget feasible is a hint, and not a rival of the answer."""
    problem = random_problem(401, 5)
    _, least = minimum_peak(problem)
    found = plan(problem, least, planner=planner, effort="fast")
    assert found.planner.startswith("whole graph")
    assert (
        found.overhead_ms == next(t for t in found.tried if t.planner == "minimum peak").overhead_ms
    )


@pytest.mark.slow
def test_the_whole_portfolio_is_at_least_as_good_as_its_parts() -> None:
    problem = NETWORKS["resnet"]
    budget = int(0.75 * keeping_all(problem))
    best = plan(problem, budget, effort="fast").overhead_ms
    for planner in ("segments", "rotor"):
        assert best <= plan(problem, budget, planner=planner, effort="fast").overhead_ms + 1e-9


def test_a_single_plan_that_does_not_fit_says_so() -> None:
    problem = NETWORKS["gpt"]
    whole = keeping_all(problem)
    with pytest.raises(InfeasibleBudgetError, match="this planner has a single plan") as caught:
        plan(problem, whole - 1, planner="none")
    assert caught.value.minimum_bytes == whole


@pytest.mark.nightly
def test_a_plan_outside_the_class_is_no_hint_for_the_whole_graph() -> None:
    """From such a plan the solver starts nowhere, and took 20 s to say so."""
    problem = resnet_problem((2, 3, 3))
    assert 55 < len(problem.nodes) <= 90
    least = minimum_peak(problem)[1]
    notes = []
    for share in (1.02, 1.5):
        found = plan(problem, int(share * least), effort="fast")
        found.check(problem)
        notes += [t.note for t in found.tried if t.planner.startswith("whole graph")]
        hint = found.steps
        result = solve_whole(
            problem, found.budget_bytes, hint=hint, deterministic_limit=0.1, unhinted_limit=0.0
        )
        assert result.status == ("unknown" if share < 1.5 else "feasible")
    assert notes[0] == "unknown"
    assert len(notes) == 2


def test_efforts() -> None:
    problem = gpt_problem(2)
    budget = int(0.6 * keeping_all(problem))
    fractions: list[float] = []
    found = plan(problem, budget, effort=2.0, progress=lambda done, text: fractions.append(done))
    assert found.peak_bytes <= budget
    assert fractions == sorted(fractions)
    assert fractions[-1] >= 0.95  # the self-test is to come
    with pytest.raises(ValueError, match="effort 'quick' is unknown; choose fast, balanced, best"):
        plan(problem, budget, effort="quick")
    with pytest.raises(ValueError, match="positive number of seconds"):
        plan(problem, budget, effort=-1)
    with pytest.raises(ValueError, match="planner 'magic' is unknown"):
        plan(problem, budget, planner="magic")


@pytest.mark.parametrize("effort", ["balanced", "best", 30.0])
def test_a_larger_effort_keeps_what_smaller_ones_found(
    effort: str | float, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = NETWORKS["unet"]
    budget = int(0.8 * keeping_all(problem))
    good = plan(problem, budget, effort="fast")
    asked: list[int] = []

    def lucky(run: Search) -> None:
        asked.append(run.effort.windows)
        steps = good.steps if run.effort.windows == EFFORTS["fast"].windows else run.fallback
        run.consider("luck", steps, 0.0)

    monkeypatch.setattr(portfolio, "_portfolio", lucky)
    monkeypatch.setattr(portfolio, "_go_on", lambda run: None)
    found = plan(problem, budget, effort=effort)
    assert found.overhead_ms <= good.overhead_ms
    assert asked == sorted(asked)
    assert asked[0] == EFFORTS["fast"].windows


def test_seconds_are_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = NETWORKS["unet"]
    budget = int(0.8 * keeping_all(problem))
    monkeypatch.setattr(portfolio, "_go_on", lambda run: None)
    ran: list[float] = []
    monkeypatch.setattr(portfolio, "_portfolio", lambda run: ran.append(run.seconds_left()))
    monkeypatch.setattr(search, "_processor_seconds", lambda: 7.0 + 20.0 * len(ran))
    with pytest.raises(SolverError):  # since nothing was searched for
        plan(problem, budget, effort=50)
    assert ran == [50.0, 30.0, 10.0]
    ran.clear()
    with pytest.raises(SolverError):
        plan(problem, budget, effort=20)
    assert ran == [20.0]


def test_a_problem_without_backward() -> None:
    problem = NETWORKS["unet"]
    forward_only = dataclasses.replace(
        problem,
        nodes=tuple(dataclasses.replace(node, has_backward=False) for node in problem.nodes),
        storages=tuple(
            dataclasses.replace(s, bwd_users=()) for s in problem.storages if not s.is_phantom
        ),
    )
    found = plan(forward_only, keeping_all(forward_only))
    assert found.status == "optimal"
    with pytest.raises(InfeasibleBudgetError):
        plan(forward_only, keeping_all(forward_only) - 1)
