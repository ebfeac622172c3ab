"""Options for every module of a step: the choice is the best there is, and its peak is exact."""

from __future__ import annotations

import itertools
import random
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rockmate.errors import InfeasibleBudgetError
from rockmate.options.module_choice import (
    ModuleCall,
    StepMemory,
    choose,
    largest,
    measured_as,
    peak_of,
    smallest_budget,
)
from rockmate.options.options import BlockOption
from rockmate.planners.module_options import module_options, plan_keeping
from rockmate.problems.link import Link
from rockmate.problems.problem import Problem
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.moves import Move
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Step
from zoo.problems import gpt_problem, movable, random_problem

small = st.integers(0, 12)


@st.composite
def options(draw: Any) -> BlockOption:
    saved = draw(small)
    return BlockOption(
        saved, saved + draw(small), saved + draw(small), float(draw(st.integers(0, 5))), ()
    )


@st.composite
def steps(draw: Any, in_flight: int | None = None) -> StepMemory:
    """A step as it would be measured: a run of the modules' references, with bytes in between."""
    rests = [draw(small) for _ in range(draw(st.integers(1, 3)))]
    calls, base = [], draw(small)
    before = base
    chosen = []
    for rest in rests:
        ways = tuple(draw(st.lists(options(), min_size=1, max_size=3)))
        reference = draw(st.integers(0, len(ways) - 1))
        start = base
        base += ways[reference].saved_bytes
        chosen.append((ways, reference, start, base + rest, base))
    held = base
    calls = [
        ModuleCall(
            name=str(place),
            options=ways,
            reference=reference,
            more_bytes=tuple(way.saved_bytes - ways[reference].saved_bytes for way in ways),
            forward_start_bytes=start,
            after_forward_bytes=after,
            backward_base_bytes=end - ways[reference].saved_bytes + draw(small),
            after_backward_bytes=start + draw(small),
            more_backward_bytes=draw(small),
        )
        for place, (ways, reference, start, after, end) in enumerate(chosen)
    ]
    flying = draw(st.integers(1, 3)) if in_flight is None else in_flight
    return StepMemory(tuple(calls), before, held + draw(small), held, flying)


def walked_peak(step: StepMemory, numbers: tuple[int, ...]) -> int:
    """Walk through the step moment by moment, with what is alive at each."""
    alive: dict[str, int] = {}
    moments = [step.before_bytes]

    def more() -> int:
        return sum(alive.values())

    for call, number in zip(step.calls, numbers, strict=True):
        option = call.options[number]
        moments.append(call.forward_start_bytes + more() + option.fwd_peak_bytes)
        alive[call.name] = option.saved_bytes - call.options[call.reference].saved_bytes
        moments.append(call.after_forward_bytes + more())
    moments.append(step.turn_bytes + more())
    others = (step.in_flight - 1) * (step.held_bytes + more())
    for call, number in reversed(list(zip(step.calls, numbers, strict=True))):
        option = call.options[number]
        del alive[call.name]
        own = option.bwd_peak_bytes + call.more_backward_bytes
        moments.append(call.backward_base_bytes + more() + own)
        moments.append(call.after_backward_bytes + more())
    return max(moments) + others


@given(steps(in_flight=1), st.integers(0, 90))
def test_the_choice_is_the_fastest_of_all_that_fit(step: StepMemory, budget: int) -> None:
    ways = [range(len(call.options)) for call in step.calls]
    fitting = [n for n in itertools.product(*ways) if walked_peak(step, n) <= budget]
    choice = choose(step, budget)
    assert (choice is None) == (not fitting)
    if choice is None:
        return
    times = [
        sum(c.options[n].overhead_ms for c, n in zip(step.calls, numbers, strict=True))
        for numbers in fitting
    ]
    assert choice.overhead_ms == min(times)
    assert choice.peak_bytes == walked_peak(step, choice.options) <= budget


@given(steps(), st.integers(0, 90), st.integers(0, 30), st.data())
def test_what_all_modules_move_has_a_limit(
    step: StepMemory, budget: int, limit: int, data: Any
) -> None:
    """Something fits if and only if it is found. No change of one module makes it faster."""
    calls = []
    for call in step.calls:
        ways = [replace(o, host_bytes=data.draw(small)) for o in call.options]
        ways[call.reference] = replace(ways[call.reference], host_bytes=0)
        calls.append(replace(call, options=tuple(ways)))
    step = replace(step, calls=tuple(calls), host_limit=limit)

    def there(numbers: tuple[int, ...]) -> int:
        pairs = zip(step.calls, numbers, strict=True)
        return sum(call.options[n].host_bytes for call, n in pairs)

    def time_ms(numbers: tuple[int, ...]) -> float:
        pairs = zip(step.calls, numbers, strict=True)
        return sum(call.options[n].overhead_ms for call, n in pairs)

    ways = itertools.product(*(range(len(call.options)) for call in step.calls))
    fitting = [n for n in ways if there(n) <= limit and walked_peak(step, n) <= budget]
    choice, part = choose(step, budget), limit // len(calls)
    if step.in_flight == 1:
        assert (choice is None) == (not fitting)
        least = smallest_budget(step)
        assert (budget >= least) == (choice is not None)
    if choice is None:
        return
    assert choice.options in fitting
    for other in fitting:
        changes = sum(a != b for a, b in zip(other, choice.options, strict=True))
        assert changes > 1 or time_ms(other) >= choice.overhead_ms
        taken = (c.options[n].host_bytes for c, n in zip(step.calls, other, strict=True))
        if step.in_flight == 1 and max(taken) <= part:
            assert time_ms(other) >= choice.overhead_ms


def test_a_module_that_gains_more_moves_more() -> None:
    """With equal parts neither of them could move."""
    stay, move = BlockOption(9, 9, 9, 0.0, ()), BlockOption(1, 1, 1, 0.0, (), host_bytes=8)
    again = BlockOption(1, 1, 1, 4.0, ())
    calls = [
        ModuleCall("a", (stay, move, again), 2, (8, 0, 0), 0, 1, 0, 0),
        ModuleCall("b", (stay, move, replace(again, overhead_ms=9.0)), 2, (8, 0, 0), 1, 2, 1, 1),
    ]
    step = StepMemory(tuple(calls), 0, 2, 2, host_limit=8)
    choice = choose(step, 9)
    assert choice is not None
    assert choice.options == (2, 1)
    assert choice.overhead_ms == 4.0


@given(steps(), st.integers(0, 200))
def test_with_others_in_flight_a_choice_fits(step: StepMemory, budget: int) -> None:
    ways = [range(len(call.options)) for call in step.calls]
    for numbers in itertools.product(*ways):
        assert peak_of(step, numbers) == walked_peak(step, numbers)
    choice = choose(step, budget)
    if choice is not None:
        assert walked_peak(step, choice.options) <= budget


@given(steps(), st.data())
def test_a_step_measured_with_other_options_says_the_same(step: StepMemory, data: Any) -> None:
    ways = [st.sampled_from(range(len(call.options))) for call in step.calls]
    numbers = data.draw(st.tuples(*ways))
    calls, kept = [], 0
    for call, number in zip(step.calls, numbers, strict=True):
        more = call.more_bytes[number]
        base, after = call.backward_base_bytes + kept, call.after_forward_bytes + kept + more
        calls.append(
            replace(
                call,
                reference=number,
                more_bytes=tuple(m - more for m in call.more_bytes),
                forward_start_bytes=call.forward_start_bytes + kept,
                after_forward_bytes=after,
                backward_base_bytes=base,
                after_backward_bytes=call.after_backward_bytes + kept,
            )
        )
        kept += more
    turn, held = step.turn_bytes + kept, step.held_bytes + kept
    other = replace(step, calls=tuple(calls), turn_bytes=turn, held_bytes=held)
    assert measured_as(other, step) == step


@given(steps())
def test_the_smallest_budget_is_just_enough(step: StepMemory) -> None:
    least = smallest_budget(step)
    assert choose(step, least) is not None
    assert least == 0 or choose(step, least - 1) is None


@given(steps(), st.randoms(use_true_random=False), st.integers(0, 200))
def test_what_fits_the_largest_fits_every_process(
    step: StepMemory, source: random.Random, budget: int
) -> None:
    def other(part: Any) -> Any:
        names = [f.name for f in fields(part) if f.name.endswith("_bytes")]
        more = {n: getattr(part, n) + source.randint(0, 9) for n in names if n != "more_bytes"}
        return replace(part, **more)

    calls = []
    for call in step.calls:
        ways = tuple(map(other, call.options))
        more = tuple(way.saved_bytes - ways[call.reference].saved_bytes for way in ways)
        calls.append(replace(other(call), options=ways, more_bytes=more))
    twin = replace(other(step), calls=tuple(calls))
    choice = choose(largest([step, twin]), budget)
    if choice is not None:
        peaks = [walked_peak(each, choice.options) for each in (step, twin)]
        assert max(peaks) <= choice.peak_bytes <= budget


@given(st.integers(0, 200))
@example(3)
def test_options_keep_and_reach_what_they_say(seed: int) -> None:
    problem = random_problem(seed, 5)
    count = len(problem.nodes)
    found = module_options(problem)
    assert found
    for option in found:
        line = simulate(problem, option.steps)
        assert option.saved_bytes == line.bytes_after[count - 1] - _gradients(problem)
        assert max(option.fwd_peak_bytes, option.bwd_peak_bytes) == line.peak_bytes
        assert option.overhead_ms == pytest.approx(line.overhead_ms)
    everything = simulate(problem, no_recomputation(problem))
    assert found[0].overhead_ms == everything.overhead_ms == 0


def twice(problem: Problem) -> Problem:
    """Return a step of two modules alike, one after the other."""
    count = len(problem.nodes)
    later = (
        replace(
            s,
            producer=s.producer + count,
            fwd_users=tuple(k + count for k in s.fwd_users),
            bwd_users=tuple(k + count for k in s.bwd_users),
        )
        for s in problem.storages
    )
    return Problem(2 * problem.nodes, (*problem.storages, *later), problem.link)


def after_each_other(problem: Problem, first: BlockOption, then: BlockOption) -> Any:
    """Return the steps and moves of two modules alike with an option each."""
    count, kinds = len(problem.nodes), len(problem.storages)
    inner = [Step(kind, k + count) for kind, k in then.steps]
    steps = (*first.steps[:count], *inner, *first.steps[count:])
    places = [t if t < count else t + len(inner) for t in range(len(first.steps))]
    moves = [
        Move(m.storage, places[m.out_after], places[m.gone_after], places[m.back_before])
        for m in first.moves
    ]
    moves += [
        Move(m.storage + kinds, *(count + t for t in (m.out_after, m.gone_after, m.back_before)))
        for m in then.moves
    ]
    return steps, tuple(moves)


@pytest.mark.parametrize("seed", [1, 2, 3, 5, 6, 8, 9, 10])
def test_options_of_several_modules_never_meet_on_the_link(seed: int) -> None:
    """Of two modules, each with any option, the step takes the sum of both extra times."""
    draw = random.Random(seed)
    link = Link(draw.choice((2.0, 20.0)), 10.0, draw.choice((0.0, 0.1)), draw.random() < 0.5)
    problem = movable(random_problem(seed, 5), link)
    options, both = module_options(problem), twice(problem)
    for first, then in itertools.product(options, repeat=2):
        line = simulate(both, *after_each_other(problem, first, then))
        assert line.overhead_ms == pytest.approx(first.overhead_ms + then.overhead_ms)
    for option in options:
        at = len(problem.nodes) - 1
        gone = {m.storage for m in option.moves if m.gone_after <= at < m.back_before}
        kept = simulate(replace(problem, link=None), option.steps).bytes_after[at]
        away = sum(problem.sizes[index] for index in gone)
        assert option.saved_bytes == kept - _gradients(problem) - away


def test_some_options_move() -> None:
    fastest = module_options(movable(gpt_problem(1)))[1]
    assert fastest.moves
    assert fastest.overhead_ms == 0
    assert fastest.moved_bytes > 0


def _gradients(problem: Any) -> int:
    order = problem.backward_order
    return problem.nodes[order[0]].grads_before_bytes if order else 0


@given(st.integers(0, 200))
def test_a_plan_that_keeps_little(seed: int) -> None:
    problem = random_problem(seed, 5)
    option = min(module_options(problem), key=lambda o: o.saved_bytes)
    peak = max(option.fwd_peak_bytes, option.bwd_peak_bytes)
    plan = plan_keeping(problem, peak, option.saved_bytes, effort="fast")
    line = simulate(problem, plan.steps)
    assert line.peak_bytes <= peak
    assert line.bytes_after[len(problem.nodes) - 1] - _gradients(problem) <= option.saved_bytes
    if peak > 0:
        with pytest.raises(InfeasibleBudgetError, match="from its forward to its backward"):
            plan_keeping(problem, peak // 1000, 0, effort="fast")
