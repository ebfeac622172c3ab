"""The checker: it counts by hand-made examples, and rejects schedules that are damaged."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracles.best_schedule import exhaustive_search
from rotor import (
    Backward,
    Chain,
    ForwardCheckpoint,
    ForwardEnableGrad,
    ForwardNoGrad,
    InvalidScheduleError,
    Option,
    Stage,
    simulate,
    solve,
)
from zoo.chains import chains

Fn, Fc, Fe, B = ForwardNoGrad, ForwardCheckpoint, ForwardEnableGrad, Backward


def plain_chain(count=3):
    """Stages whose sizes are powers of ten, so that every total can be read off."""
    stages = tuple(
        Stage(
            name=str(k),
            options=(Option(300, 1.0, 2.0, 20, 5000),),
            output_bytes=100,
            output_grad_bytes=10000,
            forward_time_ms=1.0,
            forward_peak_bytes=107,
        )
        for k in range(count)
    )
    return Chain(stages)


def test_bytes_of_a_run_without_recomputation():
    timeline = simulate(plain_chain(2), [Fe(0), Fe(1), B(1), B(0)])
    assert [row.peak_bytes for row in timeline.rows] == [
        320,  # saved + overhead, no gradient yet
        300 + 320,
        600 + 10000 + 5000,  # the gradient of the output now exists
        300 + 10000 + 5000,  # and has been replaced by the gradient of x[1]
    ]
    assert [row.after_bytes for row in timeline.rows] == [300, 600, 300 + 10000, 0]
    assert timeline.makespan_ms == 6.0


def test_bytes_of_a_checkpointed_run():
    ops = [Fc(0), Fn(1), Fe(2), B(2), Fc(0), Fe(1), B(1), Fe(0), B(0)]
    timeline = simulate(plain_chain(3), ops)
    assert [row.peak_bytes for row in timeline.rows] == [
        107,
        100 + 107,
        100 + 320,
        100 + 300 + 10000 + 5000,
        10000 + 107,
        10000 + 100 + 320,
        10000 + 100 + 300 + 5000,
        10000 + 320,
        10000 + 300 + 5000,
    ]
    assert timeline.rows[1].after_bytes == 100  # x[1] has been forgotten


def test_forgetting_an_input_has_a_price_of_its_own():
    option = Option(1, 1.0, 2.0, 0, 0, forget_time_ms=0.5)
    chain = Chain(tuple(Stage(name, (option,), 1, 1, 1.0, 1) for name in "ab"))
    kept = [Fc(0), Fe(1), B(1), Fe(0), B(0)]
    forgotten = [Fc(0), Fe(1, forget_input=True), Fe(0), B(1), B(0)]
    assert simulate(chain, kept).makespan_ms + 0.5 == simulate(chain, forgotten).makespan_ms


def test_bytes_of_a_stage_that_forgets_its_input():
    ops = [Fc(0), Fe(1, forget_input=True), B(1), Fe(0), B(0)]
    with pytest.raises(InvalidScheduleError, match=r"x\[1\] is not held"):
        simulate(plain_chain(2), ops)
    ops = [Fc(0), Fe(1, forget_input=True), Fe(0), B(1), B(0)]
    timeline = simulate(plain_chain(2), ops)
    assert [row.after_bytes for row in timeline.rows] == [
        100,
        300,  # x[1] is gone
        10000 + 300 + 300,
        10000 + 300,
        0,
    ]
    with pytest.raises(InvalidScheduleError, match="belongs to a saved stage"):
        simulate(plain_chain(2), [Fe(0), Fe(1, forget_input=True)])


@pytest.mark.parametrize(
    ("ops", "position", "reason"),
    [
        ([Fe(1)], 0, r"x\[1\] is not held"),
        ([Fe(0), Fe(0)], 1, r"x\[1\] is already held"),
        ([Fc(0), Fc(0)], 1, r"x\[1\] is already held"),
        ([Fe(0), Fe(1), B(0)], 2, "next backward is that of stage 1"),
        ([Fe(0), Fe(1), B(1), B(1)], 3, "next backward is that of stage 0"),
        ([Fe(0), Fe(1), B(1, 1)], 2, "option 1 of the stage has not been saved"),
        ([Fe(0, 7)], 0, "options 0 to 0"),
        ([Fe(5)], 0, "stages 0 to 1"),
        ([Fe(0), Fn(1)], 1, "belongs to a saved stage"),
        ([Fe(0), Fe(1), B(1), Fe(1)], 3, "its backward has already run"),
        ([Fn(0), Fe(1), B(1), Fe(0)], 3, r"x\[0\] is not held"),
        ([Fe(0), Fe(1), B(1)], 3, "ends before the backward of stage 0"),
        ([], 0, "ends before the backward of stage 1"),
    ],
)
def test_broken_schedules_are_refused_with_place_and_reason(ops, position, reason):
    with pytest.raises(InvalidScheduleError, match=reason) as caught:
        simulate(plain_chain(2), ops)
    assert caught.value.position == position


@given(chains(4), st.integers(0, 2**32 - 1))
def test_mutants_are_refused_or_really_valid(chain, seed):
    """Dropping an op always breaks a schedule; a mutant that passes must respect the optimum."""
    schedule = solve(chain, 60, slots=60)
    generator = random.Random(seed)
    ops = list(schedule.ops)
    where = generator.randrange(len(ops))
    with pytest.raises(InvalidScheduleError):
        simulate(chain, ops[:where] + ops[where + 1 :])
    with pytest.raises(InvalidScheduleError):
        simulate(chain, ops[: where + 1] + ops[where:])
    other = generator.randrange(len(ops))
    ops[where], ops[other] = ops[other], ops[where]
    try:
        timeline = simulate(chain, ops)
    except InvalidScheduleError:
        return
    best = exhaustive_search(chain, timeline.peak_bytes, persistent=False)
    assert best is not None
    assert best[0] <= timeline.makespan_ms


@given(chains(4), st.integers(3, 40), st.booleans())
def test_schedules_of_the_search_are_accepted_at_their_cost(chain, budget, persistent):
    found = exhaustive_search(chain, budget, persistent=persistent)
    if found is None or not persistent:
        return  # the unrestricted search drops values with no op of their own
    timeline = simulate(chain, found[1])
    assert timeline.makespan_ms == found[0]
    assert timeline.peak_bytes <= budget
