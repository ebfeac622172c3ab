"""Plans that move storages: bytes by order alone, three clocks, the bound, and the search."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracles.best_plan import exhaustive_search
from oracles.moving_chain import Layer, least_overhead_ms, problem_of
from rkgb.copies import in_pages
from rockmate.errors import InfeasibleBudgetError, InvalidPlanError
from rockmate.planners.arrivals import Arrivals
from rockmate.planners.copy_times import moves_for
from rockmate.planning import Link, Move, plan
from rockmate.problems.problem import Node, Problem, Storage
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.moves import Moves, clocks_of, moves_among, uses_of_copies
from rockmate.schedules.plan import Plan, make_plan
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Step, Steps
from rockmate.solvers.bound import lower_bound
from zoo.problems import FAST, gpt_problem, movable, random_problem, small_problems


def drawn(problem: Problem, draw: random.Random) -> tuple[Steps, Moves]:
    """Return random steps, and moves in random gaps between two uses of a storage."""
    count = len(problem.nodes)
    steps = [Step("F", k) for k in range(count)]
    for node in problem.backward_order:
        steps += [Step("F", draw.randrange(count)) for _ in range(draw.randint(0, 2))]
        steps.append(Step("B", node))
    moves = []
    for index, copies in enumerate(uses_of_copies(problem, steps)):
        for uses in copies if problem.storages[index].is_movable else ():
            earliest = uses[0]
            for before, behind in itertools.pairwise(uses):
                if behind - before > 1 and draw.random() < 0.6:
                    gone = draw.randrange(before, behind)
                    out = draw.randint(earliest, gone)
                    moves.append(Move(index, out, gone, draw.randint(gone + 1, behind)))
                    earliest = moves[-1].back_before
    return tuple(steps), tuple(moves)


def walked(problem: Problem, steps: Steps, moves: Moves) -> list[int]:
    """Return the bytes alive after each step, by following every copy of a storage by itself."""
    bytes_after = [0] * len(steps)
    states: dict[int, list[int]] = {}
    for index, storage in enumerate(problem.storages):
        if storage.is_phantom:
            continue
        copies = uses_of_copies(problem, steps)[index]
        for uses in copies:
            last = len(steps) if storage.is_output else uses[-1]
            for t in range(uses[0], last):
                own = (m for m in moves if m.storage == index)
                if not any(m.gone_after <= t < m.back_before - 1 for m in own):
                    bytes_after[t] += storage.size_bytes
    for t, (kind, k) in enumerate(steps):
        if kind == "F":
            states.setdefault(k, []).append(t)
    for k, runs in states.items():
        for t in range(runs[0], runs[-1]):
            bytes_after[t] += problem.nodes[k].rerun_state_bytes
    for t in range(len(problem.nodes) - 1, len(steps)):
        following = next((k for kind, k in steps[t + 1 :] if kind == "B"), None)
        if following is not None:
            bytes_after[t] += problem.nodes[following].grads_before_bytes
    return bytes_after


def test_what_moves_takes_whole_pages_in_plans_and_programs() -> None:
    for size in (1, 4095, 4096, 4097, 10**7 + 1):
        assert FAST.host_taken(size) == in_pages(size)


@given(small_problems(6), st.randoms(use_true_random=False))
def test_bytes_are_those_of_every_copy_followed_by_itself(
    problem: Problem, draw: random.Random
) -> None:
    bare = dataclasses.replace(
        problem, storages=tuple(s for s in problem.storages if not s.is_phantom)
    )
    problem = movable(bare)
    steps, moves = drawn(problem, draw)
    timeline = simulate(problem, steps, moves)
    assert list(timeline.bytes_after) == walked(problem, steps, moves)
    slow = dataclasses.replace(problem, link=Link(1e-3, 1e-3, latency_ms=1.0))
    assert simulate(slow, steps, moves).peak_during == timeline.peak_during


def chain() -> Problem:
    """a -> b -> c, 8 bytes each, each backward reads its own result."""
    nodes = tuple(Node(name, 1.0, 2.0, True, 8, 8, 1) for name in "abc")
    storages = (
        Storage("x", 8, 0, (1,), (0,), is_movable=True),
        Storage("y", 8, 1, (2,), (1,), is_movable=True),
        Storage("z", 8, 2, (), (2,), is_output=True),
    )
    return Problem(nodes, storages, Link(8.0, 4.0, latency_ms=0.5))


def test_clocks_by_hand() -> None:
    problem = chain()
    steps = no_recomputation(problem)  # F0 F1 F2 B2 B1 B0, from 0 1 2 3 5 7 to 9 ms
    # x goes out from 1 to 2.5, gone after F1 at 2: a stall of 0.5. It comes back from 5.5 (before
    # B1) to 8, and B0, which begins at 7.5, waits for it.
    moves = (Move(0, 0, 1, 4),)
    clocks = clocks_of(problem, steps, moves, Link(8.0, 4.0, latency_ms=0.5))
    assert clocks.stalls == ((1, 0.5), (5, 0.5))
    assert (clocks.total_ms, clocks.stall_ms) == (10.0, 1.0)
    assert (clocks.out_ms, clocks.in_ms) == (1.5, 2.5)
    # One step later the copy has ended; one step earlier there is time enough to come back.
    assert clocks_of(problem, steps, (Move(0, 0, 2, 3),), problem.link or FAST).stall_ms == 0
    # y goes out behind x. Where both directions take turns, x comes back only behind it.
    both = (Move(0, 0, 1, 3), Move(1, 1, 2, 4))
    apart = clocks_of(problem, steps, both, Link(8.0, 4.0))
    shared = clocks_of(problem, steps, both, Link(8.0, 4.0, is_shared=True))
    assert apart.total_ms <= shared.total_ms
    timeline = simulate(problem, steps, (Move(0, 0, 1, 4),))
    # F2 and B2 run without x: y, z and own 8; y, z and own 1. It is there again during B1.
    assert timeline.peak_during == (8, 16, 16, 17, 25, 17)
    assert timeline.overhead_ms == timeline.stall_ms == 1.0


def test_of_what_comes_in_before_one_step_the_first_read_comes_first() -> None:
    problem = chain()
    steps = no_recomputation(problem)
    # Both are wanted before B2, at 3 ms. y is there at 5, when B1 reads it, and x at 7, for B0.
    both = (Move(0, 0, 1, 3), Move(1, 1, 2, 3))
    clocks = clocks_of(problem, steps, both, Link(1e9, 4.0))
    assert clocks.stalls == ()
    assert clocks.total_ms == 9.0


@given(small_problems(6), st.randoms(use_true_random=False), st.booleans())
def test_a_slower_link_is_never_faster(
    problem: Problem, draw: random.Random, is_shared: bool
) -> None:
    problem = movable(problem)
    steps, moves = drawn(problem, draw)
    totals = []
    for rate in (1e9, 3.0, 1.0, 0.3):
        clocks = clocks_of(problem, steps, moves, Link(rate, rate, is_shared=is_shared))
        totals.append(clocks.total_ms)
        assert clocks.total_ms >= max(clocks.out_ms, clocks.in_ms) - 1e-9
        assert abs(sum(wait for _, wait in clocks.stalls) - clocks.stall_ms) < 1e-6
    assert totals == sorted(totals)


@given(small_problems(5), st.randoms(use_true_random=False), st.booleans())
def test_the_bound_is_never_above_a_plan(
    problem: Problem, draw: random.Random, is_shared: bool
) -> None:
    rate = draw.choice((0.5, 2.0, 8.0))
    problem = movable(problem, Link(rate, 1.5 * rate, draw.choice((0.0, 0.3)), is_shared))
    steps, moves = drawn(problem, draw)
    timeline = simulate(problem, steps, moves)
    for cuts in (0, 2):
        assert lower_bound(problem, timeline.peak_bytes, cuts=cuts) <= timeline.overhead_ms + 1e-6


@pytest.mark.parametrize("seed", range(700, 724))
def test_plans_against_all_schedules_over_a_fast_link(seed: int) -> None:
    problem = movable(random_problem(seed, 2 + seed % 4, states=False))
    peak = simulate(problem, no_recomputation(problem)).peak_bytes
    for budget in (3 * peak // 4, 3 * peak // 5):
        oracle = exhaustive_search(problem, budget, moving=True)
        bound = lower_bound(problem, budget)
        if oracle is None:
            with pytest.raises(InfeasibleBudgetError):
                plan(problem, budget)
            continue
        assert bound <= oracle[0] + 1e-9
        still = exhaustive_search(problem, budget)
        try:
            found = plan(problem, budget)
        except InfeasibleBudgetError:  # the search for the least peak is no proof
            with pytest.raises(InfeasibleBudgetError):
                plan(dataclasses.replace(problem, link=None), budget)
            continue
        assert found.overhead_ms >= oracle[0] - 1e-6
        found.check(problem)
        if still is not None:
            assert found.overhead_ms <= still[0] + 1e-6 or found.overhead_ms <= 1.5 * still[0]


@pytest.mark.parametrize("seed", [1, 3, 4, 5, 7, 8, 11, 13, 15, 19, 23, 36])
def test_chains_against_all_choices_over_slow_links(seed: int) -> None:
    """Kept, moved or computed again: no plan is much slower, and no bound above.

    Also where recomputation alone does not fit; then all that fits is found to.
    """
    draw = random.Random(seed)
    layers = [
        Layer(draw.uniform(1, 4), draw.uniform(2, 8), draw.randint(8, 40), draw.randint(1, 8))
        for _ in range(draw.randint(4, 7))
    ]
    rate = draw.choice((2.0, 5.0, 15.0))
    link = Link(rate, draw.choice((1.0, 2.0)) * rate, latency_ms=draw.choice((0.0, 0.2)))
    problem = problem_of(layers, link)
    peak = simulate(problem, no_recomputation(problem)).peak_bytes
    for part in (0.85, 0.7, 0.6, 0.5):
        oracle_ms = least_overhead_ms(layers, budget := int(part * peak), link)
        assert lower_bound(problem, budget, cuts=2) <= oracle_ms + 1e-6
        if oracle_ms < math.inf:
            found = plan(problem, budget, effort="fast")
            found.check(problem)
            assert found.overhead_ms <= oracle_ms + 0.03 * problem.base_time_ms


@given(small_problems(6), st.randoms(use_true_random=False))
def test_no_step_takes_more_than_where_storages_arrive(
    problem: Problem, draw: random.Random
) -> None:
    """Whatever the steps in which they arrive: some move fits, so a planner's peak is reached."""
    problem = movable(problem)
    chosen = [i for i, s in enumerate(problem.storages) if s.is_movable and draw.random() < 0.7]
    arrivals = Arrivals(problem, chosen, takes_time=False)
    steps = arrivals.hint(drawn(problem, draw)[0])
    count = len(arrivals.problem.nodes)
    forward: list[Step] = []
    for k in range(count):  # where the forward runs nodes again, too
        again = (draw.randrange(k) for _ in range(draw.randint(0, 2) if k else 0))
        forward += [*(Step("F", j) for j in again), Step("F", k)]
    steps = (*forward, *steps[count:])
    peak = simulate(arrivals.problem, steps).peak_bytes
    own, places = arrivals.split(steps)
    moves = next(moves_for(problem, own, places, peak), None)
    assert moves is not None
    assert simulate(problem, own, moves).peak_bytes <= peak


# Schedules by HRevolve of checkpoint_schedules 1.0.4 (uf=1, ub=1), which moves while nothing
# computes: steps, snapshots in memory and on disk, times to write and read one; then how many
# forwards run, snapshots are written and read.
HREVOLVE = [
    (6, 1, 0, 1.0, 1.0, 21, 0, 0),
    (8, 2, 0, 1.0, 1.0, 22, 0, 0),
    (10, 3, 0, 1.0, 1.0, 25, 0, 0),
    (6, 1, 3, 2.0, 2.0, 15, 1, 1),
    (8, 1, 3, 2.0, 2.0, 22, 1, 2),
    (8, 1, 6, 0.1, 0.1, 15, 6, 6),
    (10, 2, 3, 0.5, 0.5, 24, 2, 2),
    (10, 1, 3, 0.5, 0.5, 24, 3, 4),
    (12, 3, 3, 0.5, 0.5, 30, 1, 1),
    (12, 1, 6, 0.1, 0.1, 27, 6, 6),
]


@pytest.mark.parametrize("row", HREVOLVE, ids=str)
def test_chains_take_no_longer_than_hrevolve_without_overlap(row: tuple[float, ...]) -> None:
    """Its forwards recompute on several levels. No bound is above them, and no plan is slower."""
    steps, ram, disk, write_ms, read_ms, forwards, writes, reads = row
    size = 4096
    # The first of its snapshots is the input, which no budget counts. Beside the others there are
    # what a forward reads and makes; a backward includes the forward that it begins with.
    places, there = (ram + 1, 0) if not writes else (ram + 2, int(disk) - 1)
    link = Link(size / write_ms, size / read_ms, host_bytes=there * size)
    layers = [Layer(1.0, 2.0, size, 0)] * (int(steps) - 1)
    problem = problem_of([*layers, Layer(1.0, 2.0, 1, 0)], link)
    budget = int(places) * size + 1
    extra_ms = forwards - (2 * steps - 1) + writes * write_ms + reads * read_ms
    found = plan(problem, budget, effort="fast")
    assert lower_bound(problem, budget, cuts=2) <= found.overhead_ms + 1e-6
    assert found.overhead_ms <= extra_ms + 1e-6


def test_a_link_that_carries_all_makes_recomputation_needless() -> None:
    problem = gpt_problem(4)
    peak = simulate(problem, no_recomputation(problem)).peak_bytes
    budget = int(0.5 * peak)
    still = plan(problem, budget, effort="fast", planner="segments")
    free = plan(movable(problem), budget, effort="fast", planner="segments")
    assert still.overhead > 0.02
    assert free.overhead == 0
    assert free.moves
    assert free.peak_bytes <= budget
    assert free.status == "optimal"


def test_half_a_link_saves_part_of_the_time() -> None:
    problem = gpt_problem(4)
    peak = simulate(problem, no_recomputation(problem)).peak_bytes
    saved = sum(s.size_bytes for s in problem.storages if s.bwd_users)
    rate = 0.2 * saved / sum(node.fwd_time_ms for node in problem.nodes)
    budget = int(0.5 * peak)
    still = plan(problem, budget, effort="fast", planner="segments")
    found = plan(movable(problem, Link(rate, rate)), budget, effort="fast", planner="segments")
    assert found.overhead_ms < still.overhead_ms
    assert found.peak_bytes <= budget


def layers(count: int) -> Problem:
    """Layers of a product and a pointwise step, 8 bytes each, as in a perceptron."""
    nodes: list[Node] = []
    storages: list[Storage] = []
    for k in range(2 * count):
        fwd, bwd, own = (0.05, 0.12, 8) if k % 2 else (0.47, 0.86, 12)
        nodes.append(Node(f"n{k}", fwd, bwd, True, 8, 8, own, 8))
        last = k == 2 * count - 1
        users = () if last else (k + 1,)
        storages.append(Storage(f"s{k}", 8, k, users, users, is_output=last, is_movable=not last))
    return Problem(tuple(nodes), tuple(storages))


def test_copies_that_come_a_little_late_are_better_than_recomputation() -> None:
    problem, budget = layers(12), 80
    still = plan(problem, budget, effort="fast")
    linked = dataclasses.replace(problem, link=Link(23.0, 21.0, latency_ms=0.066))
    found = plan(linked, budget, effort="fast")
    # No time is left for some copies in flight beside what the budget holds.
    assert found.overhead < 0.4 * still.overhead
    assert found.peak_bytes <= budget


def test_the_other_side_has_a_limit() -> None:
    problem = gpt_problem(4)
    budget = int(0.6 * simulate(problem, no_recomputation(problem)).peak_bytes)
    whole = plan(movable(problem), budget, effort="fast", planner="segments")
    taken = {m.storage: FAST.host_taken(problem.sizes[m.storage]) for m in whole.moves}
    limit = sum(taken.values()) // 3
    link = dataclasses.replace(FAST, host_bytes=limit)
    found = plan(movable(problem, link), budget, effort="fast", planner="segments")
    used = {m.storage: link.host_taken(problem.sizes[m.storage]) for m in found.moves}
    assert sum(used.values()) <= limit
    with pytest.raises(InvalidPlanError, match="bytes elsewhere"):
        simulate(movable(problem, link), whole.steps, whole.moves)


WRONG = {
    "is of a storage that may not be moved": Move(2, 2, 2, 3),
    "must go out, be gone and come back": Move(0, 2, 1, 4),
    "takes away what is not there": Move(0, 5, 5, 5),
    "starts before step 1 has made it": Move(1, 0, 2, 4),
    "brings back what nothing reads": Move(1, 1, 2, 5),
    "takes away what a step reads meanwhile": Move(0, 0, 0, 3),
}


@pytest.mark.parametrize("why", WRONG)
def test_moves_that_cannot_be_are_refused(why: str) -> None:
    problem, move = chain(), WRONG[why]
    steps = no_recomputation(problem)
    if move.back_before == move.gone_after:
        why = "must go out, be gone and come back"
    with pytest.raises(InvalidPlanError, match=why):
        simulate(problem, steps, (move,))


def test_a_second_move_of_a_storage_begins_behind_the_first() -> None:
    problem, steps = chain(), no_recomputation(chain())
    with pytest.raises(InvalidPlanError, match="before an earlier move"):
        simulate(problem, steps, (Move(0, 0, 1, 4), Move(0, 2, 2, 5)))


def test_plans_with_moves_are_saved_and_read() -> None:
    problem = chain()
    steps, moves = no_recomputation(problem), (Move(0, 0, 1, 4), Move(1, 1, 2, 4))
    made = make_plan(problem, steps, 64, "by hand", moves)
    assert Plan.from_json(made.to_json()) == made
    made.check(problem)
    assert Problem.from_json(problem.to_json()) == problem
    assert tuple(map(Move.of_text, map(str, moves))) == moves
    with pytest.raises(ValueError, match="no move"):
        Move.of_text("3:5-9")
    plain = make_plan(problem, steps, 64, "by hand")
    assert '"moves"' not in plain.to_json()
    assert Plan.from_json(plain.to_json()) == plain


@given(small_problems(6), st.randoms(use_true_random=False))
def test_moves_follow_the_steps_that_are_kept(problem: Problem, draw: random.Random) -> None:
    problem = movable(problem)
    steps, moves = drawn(problem, draw)
    assert moves_among(moves, range(len(steps))) == moves
    first = len(problem.nodes)
    kept = [t for t, s in enumerate(steps) if t < first or s.kind == "B"]
    short = tuple(steps[t] for t in kept)
    for move in moves_among(moves, kept):
        assert 0 <= move.out_after <= move.gone_after < move.back_before < len(short)
