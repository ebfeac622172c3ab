"""The exact simulator against an exhaustive search; what steps imply; editing and saving plans."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracles.best_plan import exhaustive_search
from rockmate.errors import InvalidPlanError
from rockmate.problems.problem import Node, Problem, Storage
from rockmate.schedules.baselines import checkpoint_segments, no_recomputation
from rockmate.schedules.liveness import liveness
from rockmate.schedules.plan import Plan, make_plan
from rockmate.schedules.prune import EditablePlan, prune
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Step
from zoo.problems import gpt_problem, random_problem, small_problems


def forward(node: int) -> Step:
    return Step("F", node)


def backward(node: int) -> Step:
    return Step("B", node)


def two_nodes() -> Problem:
    """a makes s (10) and phantom p (3); b reads s in both directions and returns y (2)."""
    return Problem(
        nodes=(
            Node("a", 1.0, 2.0, True, 15, 12, 7, 5, rerun_state_bytes=1),
            Node("b", 2.0, 2.0, True, 4, 4, 6, 2),
        ),
        storages=(
            Storage("s", 10, 0, (1,), (1,)),
            Storage("p", 3, 0, (), (0,), is_phantom=True),
            Storage("y", 2, 1, is_output=True),
        ),
    )


def test_timeline_by_hand() -> None:
    problem = two_nodes()
    kept = simulate(problem, (forward(0), forward(1), backward(1), backward(0)))
    # F0 records: 15. F1: s + p alive, own 4. B1: s, p, y, gradients 2, own 6. B0: p, y, 5, own 7.
    assert kept.peak_during == (15, 17, 23, 17)
    assert kept.bytes_after == (13, 17, 10, 2)
    assert kept.overhead_ms == 0
    again = simulate(problem, (forward(0), forward(1), forward(0), backward(1), backward(0)))
    # the first F0 records nothing and keeps its state; the second makes s and p anew
    assert again.peak_during == (13, 15, 20, 23, 17)
    assert again.overhead_ms == 1.0
    assert again.peak_step == 3


def test_what_steps_keep_and_record() -> None:
    problem = two_nodes()
    steps = (forward(0), forward(1), forward(0), backward(1), backward(0))
    after, records, _ = liveness(problem, steps)
    s, p, y = 1, 2, 4
    # the first s goes after F1, the second after B1, its last reader
    assert after == [s, y, s | p | y, p | y, y]
    # the second F0 makes the phantom that B0 reads; b has none, and records at once
    assert records == [False, True, True, False, False]
    # the state of a is kept from its first forward to its last, and gradients follow
    assert simulate(problem, steps).bytes_after == (10 + 1, 2 + 1 + 2, 15 + 2, 5 + 5, 2)


@pytest.mark.parametrize("seed", range(40))
def test_predictions_equal_the_exhaustive_semantics(seed: int) -> None:
    problem = random_problem(seed, 2 + seed % 4)
    peak = simulate(problem, no_recomputation(problem)).peak_bytes
    for budget in (peak, 3 * peak // 4, 3 * peak // 5):
        in_forward = budget < peak
        found = exhaustive_search(problem, budget, in_forward=in_forward)
        if found is not None:
            timeline = simulate(problem, found[1], budget_bytes=budget)
            assert timeline.overhead_ms == found[0]
            # one byte less than the steps' own peak and the search must pay more, or give up
            tighter = exhaustive_search(problem, timeline.peak_bytes, in_forward=in_forward)
            assert tighter is not None
            assert tighter[0] == found[0]


@given(small_problems(), st.randoms(use_true_random=False))
def test_replay_keeps_what_is_read(problem: Problem, draw: random.Random) -> None:
    """Execute the steps on sets: everything a step reads is there, nothing comes from nowhere."""
    steps = random_steps(problem, draw)
    after, records, _ = liveness(problem, steps)
    outputs = {i for i, s in enumerate(problem.storages) if s.is_output}
    held: set[int] = set()
    recorded: set[int] = set()
    for t, (kind, k) in enumerate(steps):
        if kind == "F":
            assert held >= set(problem.fwd_inputs[k])
            phantoms = {i for i in problem.products[k] if problem.storages[i].is_phantom}
            held |= set(problem.products[k]) - (set() if records[t] else phantoms)
            if records[t]:
                recorded.add(k)
        else:
            assert not records[t]
            assert held >= set(problem.bwd_inputs[k])
            assert k in recorded
        kept = {i for i in range(len(problem.storages)) if after[t] >> i & 1}
        assert held >= kept
        assert kept >= outputs & held
        held = kept
    assert held == outputs


def random_steps(problem: Problem, draw: random.Random) -> tuple[Step, ...]:
    count = len(problem.nodes)
    steps: list[Step] = []
    for k in range(count):
        steps += [forward(draw.randrange(k)) for _ in range(draw.randint(0, 2)) if k]
        steps.append(forward(k))
    for node in problem.backward_order:
        steps += [forward(draw.randrange(count)) for _ in range(draw.randint(0, 3))]
        steps.append(backward(node))
    return tuple(steps)


@given(small_problems(7), st.randoms(use_true_random=False))
def test_incremental_drops_equal_a_fresh_simulation(problem: Problem, draw: random.Random) -> None:
    steps = random_steps(problem, draw)
    plan = EditablePlan(problem, steps)
    budget = simulate(problem, steps).peak_bytes
    left = dict(enumerate(steps))
    for t in draw.sample(plan.recomputations(), len(plan.recomputations())):
        without = tuple(step for i, step in left.items() if i != t)
        fresh = simulate(problem, without)
        dropped = plan.drop(t, budget)
        assert dropped or fresh.peak_bytes > budget
        if dropped:
            del left[t]
            assert plan.steps == without
            assert tuple(plan.peaks[list(left)]) == fresh.peak_during


@given(small_problems(6), st.randoms(use_true_random=False))
def test_prune_never_raises_peak_or_time(problem: Problem, draw: random.Random) -> None:
    steps = random_steps(problem, draw)
    before = simulate(problem, steps)
    after = simulate(problem, prune(problem, steps, before.peak_bytes))
    assert after.peak_bytes <= before.peak_bytes
    assert after.overhead_ms <= before.overhead_ms


GOOD = (forward(0), forward(1), backward(1), backward(0))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (GOOD[1:], "step 0 of the plan must be F0"),
        (GOOD[:1], "must be F1.*the end of the plan"),
        ((*GOOD[:2], GOOD[3], GOOD[2]), "expected B1: backwards run once each"),
        (GOOD[:3], "the plan ends before B0"),
        ((*GOOD, forward(0)), "after the last backward"),
        ((*GOOD, backward(0)), "expected no further backward"),
        ((*GOOD[:3], forward(7), GOOD[3]), "the problem has nodes 0 to 1"),
    ],
)
def test_invalid_plans_are_refused_with_the_reason(steps, message) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        simulate(two_nodes(), steps)


def test_a_plan_above_its_budget_is_refused() -> None:
    with pytest.raises(InvalidPlanError, match=r"step 2 \(B1, b\) needs 23"):
        simulate(two_nodes(), GOOD, budget_bytes=22)


def test_plans_are_saved_and_checked_on_loading(tmp_path) -> None:
    problem = two_nodes()
    plan = make_plan(problem, GOOD, 30, "by hand", bound_ms=7.0)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", problem) == plan
    assert plan.gap == 0.0
    with pytest.raises(InvalidPlanError, match="made for a network with fingerprint"):
        Plan.load(tmp_path / "plan.json", gpt_problem(1))
    with pytest.raises(InvalidPlanError, match="expected a plan in format"):
        Plan.from_json("{}")
    with pytest.raises(InvalidPlanError, match="found no JSON"):
        Plan.from_json("no json")
    text = plan.to_json()
    with pytest.raises(InvalidPlanError, match=r"plan\.peak_bytes: expected int, found '23'"):
        Plan.from_json(text.replace('"peak_bytes": 23', '"peak_bytes": "23"', 1))
    with pytest.raises(InvalidPlanError, match="'3:5-9' is no move"):
        Plan.from_json(text.replace('"steps"', '"moves": "3:5-9", "steps"', 1))


def test_steps_as_text() -> None:
    assert " ".join(map(str, GOOD)) == "F0 F1 B1 B0"
    assert tuple(map(Step.of_text, ["F0", "F1", "B1", "B0"])) == GOOD
    with pytest.raises(ValueError, match="'X3' is no step"):
        Step.of_text("X3")


def test_segments_lower_the_peak() -> None:
    problem = gpt_problem(4)
    everything = simulate(problem, no_recomputation(problem)).peak_bytes
    segments = simulate(problem, checkpoint_segments(problem, (10, 20, 30))).peak_bytes
    assert segments < everything
