"""The strategies to compare with: they are what their papers say, and never beat the optimum."""

import random
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotor import Chain, InfeasibleBudgetError, Option, Stage, simulate, solve
from rotor.schedules.ops import Backward
from rotor.strategies import (
    STRATEGIES,
    chen,
    no_checkpointing,
    optimal,
    recompute_all,
    revolve,
    revolve_costs,
)
from zoo.chains import chains, random_chain


def homogeneous(count, saved=1):
    """Stages of time 1 and size 1, whose backward needs nothing on top."""
    option = Option(saved, 1.0, 1.0, 0, 0)
    return Chain(tuple(Stage(str(k), (option,), 1, 0, 1.0, 1) for k in range(count)))


@given(chains(9, options=2), st.integers(1, 9), st.integers(0, 8))
def test_every_strategy_is_valid_and_none_beats_the_optimum_at_its_own_peak(
    chain, segments, checkpoints
):
    found = [
        no_checkpointing(chain),
        recompute_all(chain),
        chen(chain, segments=min(segments, len(chain))),
        revolve(chain, checkpoints=checkpoints),
    ]
    for schedule in found:
        timeline = simulate(chain, schedule.ops)
        assert (timeline.peak_bytes, timeline.makespan_ms) == (
            schedule.peak_bytes,
            schedule.makespan_ms,
        )
        best = solve(chain, schedule.peak_bytes, slots=max(schedule.peak_bytes, 1))
        assert best.makespan_ms <= schedule.makespan_ms


def forward_steps(schedule):
    return sum(not isinstance(op, Backward) for op in schedule.ops)


@pytest.mark.parametrize("length", [1, 2, 5, 10, 31])
@pytest.mark.parametrize("checkpoints", [0, 1, 2, 3, 7])
def test_revolve_attains_the_binomial_number_of_steps(length, checkpoints):
    """Griewank and Walther: with s = checkpoints + 1 states, t = r l - C(s + r, s + 1)."""
    states = checkpoints + 1
    repeats = 0
    while comb(states + repeats, states) < length:
        repeats += 1
    expected = repeats * length - comb(states + repeats, states + 1)
    assert revolve_costs(length, checkpoints)[checkpoints][length] == expected
    schedule = revolve(homogeneous(length), checkpoints=checkpoints)
    # Besides, every stage is run once with grad, just before its backward.
    assert forward_steps(schedule) == expected + length


@pytest.mark.parametrize("length", [3, 8, 14])
def test_revolve_is_the_optimum_of_homogeneous_chains(length):
    """Where a recorded stage takes as much as a checkpoint, no schedule is faster."""
    chain = homogeneous(length)
    for checkpoints in range(length - 1):
        schedule = revolve(chain, checkpoints=checkpoints)
        best = solve(chain, schedule.peak_bytes, slots=schedule.peak_bytes)
        assert best.makespan_ms <= schedule.makespan_ms
        # The optimum may also keep stages recorded, which Revolve never does.
        assert best.makespan_ms >= schedule.makespan_ms - length


def test_revolve_takes_as_many_checkpoints_as_fit():
    chain = random_chain(random.Random(4), 9)
    peaks = [revolve(chain, checkpoints=c).peak_bytes for c in range(9)]
    schedule = revolve(chain, max(peaks))
    assert schedule.ops == revolve(chain, checkpoints=8).ops
    with pytest.raises(InfeasibleBudgetError, match="This is for Revolve") as caught:
        revolve(chain, min(peaks) - 1)
    assert caught.value.minimum_bytes == min(peaks)


def test_chen_segments_are_those_of_checkpoint_sequential():
    schedule = chen(homogeneous(7), segments=3)
    assert str(schedule) == (
        "Fc(0) Fn(1) Fc(2) Fn(3) Fe(4) Fe(5) Fe(6) B(6) B(5) B(4) "
        "Fe(2) Fe(3) B(3) B(2) Fe(0) Fe(1) B(1) B(0)"
    )
    assert chen(homogeneous(7), segments=1).ops == no_checkpointing(homogeneous(7)).ops
    with pytest.raises(ValueError, match="segments is 8, and the chain has 7 stages"):
        chen(homogeneous(7), segments=8)


def test_recompute_all_is_quadratic_and_holds_least():
    chain = homogeneous(6, saved=3)
    schedule = recompute_all(chain)
    assert forward_steps(schedule) == 6 * 7 // 2
    assert schedule.peak_bytes <= min(
        s.peak_bytes for s in (no_checkpointing(chain), chen(chain, segments=2))
    )


def test_one_interface():
    chain = random_chain(random.Random(2), 5)
    assert set(STRATEGIES) == {"optimal", "intervals", "none", "chen", "revolve", "recompute_all"}
    for name, strategy in STRATEGIES.items():
        if name != "intervals":
            assert strategy(chain, 10**6).peak_bytes > 0
    assert optimal(chain, 10**6).ops == no_checkpointing(chain).ops
