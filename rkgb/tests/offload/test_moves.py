"""Programs that move storages: the same bits, in an order that needs no luck, or refused."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_cuda.queues import FakeQueues
from oracles.check_program import check_program
from oracles.gradients import gradients_of_module, run_program
from rkgb.capture.record import make_B
from rkgb.copies import Disk, Pinned
from rkgb.device.rng import RngState
from rkgb.elements import same_bits
from rkgb.engine import compile_step, plain_callee
from rkgb.errors import InvalidGraphError
from rkgb.graphs.dataflow import B_to_D
from rkgb.graphs.simplified import D_to_S, SimplifiedGraph
from rkgb.run import (
    MoveOut,
    Moving,
    RootMove,
    TakeArena,
    movable_roots,
    moves_without_idle_steps,
    without_idle_steps,
)
from rkgb.run.graph.node_storages import storages_of
from rkgb.run.graph.views import runnable
from rkgb.run.program.lowering import lower_step
from runs.moves import CheckedHost, Layers, MovingStep, drawn_moves, steps_of
from zoo.examples import EXAMPLES, example

CPU = torch.device("cpu")


@functools.cache
def graph_of(name: str) -> SimplifiedGraph:
    model, sample = example(name)
    return runnable(D_to_S(B_to_D(make_B(model, sample)))).graph


@pytest.mark.parametrize("name", EXAMPLES)
def test_moved_storages_have_the_same_bits(name: str, tmp_path: Path) -> None:
    graph = graph_of(name)

    @settings(max_examples=6)
    @given(seed=st.integers(0, 2**32), place=st.sampled_from(("host", "disk", "pinned")))
    def check(seed: int, place: str) -> None:
        draw = random.Random(seed)
        steps = steps_of(graph, draw)
        program = lower_step(graph, steps, moves=drawn_moves(graph, steps, draw))
        check_program(graph, program)
        start = RngState.save(CPU)
        model, sample = example(name)
        start.restore()
        expected = gradients_of_module(model, sample)
        model, sample = example(name)
        start.restore()
        checked = CheckedHost(draw)
        way: dict[str, dict[str, Any]] = {
            "host": {"copies": checked, "callee": checked.callee},
            "disk": {"copies": Disk(tmp_path)},
            "pinned": {"copies": Pinned(FakeQueues(lambda: draw.random() / 1e3))},
        }
        found = run_program(graph, program, model, sample, **way[place])[1]
        assert all(map(same_bits, found, expected))

    check()


def test_most_of_what_is_saved_can_move() -> None:
    """What stays is the result, which the user holds."""
    step = MovingStep(Layers(), torch.randn(8, 16))
    kept = {s.root for made in storages_of(step.graph) for s in made if s.bwd_users}
    assert kept - movable_roots(step.graph) <= step.graph.output_roots
    assert len(movable_roots(step.graph)) > 8


def test_each_statement_of_a_move_is_needed() -> None:
    """The checker of programs refuses every program that lacks one."""
    step = MovingStep(Layers(), torch.randn(8, 16))
    moves = drawn_moves(step.graph, step.steps, random.Random(2))
    program = lower_step(step.graph, step.steps, moves=moves)
    check_program(step.graph, program)
    kinds = (TakeArena, MoveOut, Moving)
    tried = 0
    for half in ("forward", "backward"):
        statements = getattr(program, half)
        for place, statement in enumerate(statements):
            if not isinstance(statement, kinds):
                continue
            without = (*statements[:place], *statements[place + 1 :])
            with pytest.raises(InvalidGraphError):
                check_program(step.graph, replace(program, **{half: without}))
            tried += 1
    assert tried > 3 * len(moves)


def test_what_is_read_first_is_brought_back_first() -> None:
    """Copies of one direction take turns, so another order would let a step wait for both."""
    step = MovingStep(Layers(), torch.randn(8, 16))
    count, roots = len(step.graph.nodes), sorted(movable_roots(step.graph))
    moves = [
        RootMove(root, count - 1, count - 1, count + 1) for root in roots if _is_kept(step, root)
    ]
    statements = lower_step(step.graph, step.steps, moves=moves).backward
    moving = [s for s in statements if isinstance(s, Moving)]
    back, arrivals = ([s.name for s in moving if s.kind == kind] for kind in ("back", "arrive"))
    assert len(back) > 3
    assert back == arrivals


def _is_kept(step: MovingStep, root: str) -> bool:
    """Whether the last backward but one has run when a storage is read."""
    (storage,) = (s for made in storages_of(step.graph) for s in made if s.root == root)
    reads = [step.steps.index(("B", user)) for user in storage.bwd_users]
    return bool(reads) and min(reads) > len(step.graph.nodes)


def test_places_in_the_arena_are_used_again_once_a_storage_is_back() -> None:
    step = MovingStep(Layers(), torch.randn(512, 16))  # storages of eight pages
    roots = sorted(movable_roots(step.graph))
    first, second = roots[:2]
    made = {s.root: s for row in storages_of(step.graph) for s in row}
    last = [min(step.steps.index(("B", k)) for k in made[n].bwd_users) for n in (first, second)]
    apart = [RootMove(n, t - 2, t - 2, t - 1) for n, t in zip((first, second), last, strict=True)]
    beside = [replace(move, out_after=len(step.graph.nodes) - 1) for move in apart]
    size = step.graph.infos[first].storage_bytes
    for moves, expected in ((apart, size), (beside, 2 * size)):
        assert lower_step(step.graph, step.steps, moves=moves).arena_bytes == expected


# ---------------------------------------------------------------------- refusals


def simple() -> tuple[MovingStep, RootMove]:
    step = MovingStep(Layers(2), torch.randn(4, 16))
    storage = next(
        s
        for made in storages_of(step.graph)
        for s in made
        if s.root in movable_roots(step.graph) and s.bwd_users and s.fwd_users and s.producer
    )
    last = max(storage.fwd_users)
    back = min(step.steps.index(("B", k)) for k in storage.bwd_users)
    return step, RootMove(storage.root, last, last, back)


def refused(step: MovingStep, *moves: RootMove) -> str:
    with pytest.raises(InvalidGraphError) as caught:
        lower_step(step.graph, step.steps, moves=moves)
    return str(caught.value)


def test_moves_against_the_order_are_refused_with_their_storage() -> None:
    step, move = simple()
    lower_step(step.graph, step.steps, moves=[move])
    made, end = step.graph.producer[move.root], len(step.steps)
    for wrong, words in (
        (replace(move, out_after=move.back_before), "another order"),
        (replace(move, gone_after=move.back_before), "another order"),
        (replace(move, back_before=end), "another order"),
        (replace(move, out_after=-1), "another order"),
        (replace(move, out_after=made - 1), "before it is made"),
        (replace(move, out_after=made, gone_after=made), "reads while it is away"),
        (replace(move, back_before=move.back_before + 1), "reads while it is away"),
    ):
        text = refused(step, wrong)
        assert words in text, wrong
        assert f"'{move.root}'" in text
    assert "another order" in refused(step, move, move)


def test_what_others_hold_is_not_moved() -> None:
    step, move = simple()
    (output,) = step.graph.output_roots
    assert "others than the program" in refused(step, replace(move, root=output))
    (external, *_) = step.graph.basic.externals
    assert "others than the program" in refused(step, replace(move, root=external))


def test_what_nothing_reads_later_is_not_moved() -> None:
    step, move = simple()
    made = step.graph.producer[move.root]
    again = ("F", made)
    step.steps.insert(move.back_before, again)
    assert "nothing reads later" in refused(step, move)


def test_a_program_with_moves_needs_what_takes_them() -> None:
    step, move = simple()
    program = lower_step(step.graph, step.steps, moves=[move])
    with pytest.raises(InvalidGraphError, match="nothing was given that takes them"):
        compile_step(step.graph, program, plain_callee)


# ---------------------------------------------------------------------- other gradients


@pytest.mark.parametrize("name", EXAMPLES)
def test_moves_follow_the_steps_that_other_gradients_need(name: str) -> None:
    """Some parameters are frozen for a second recording; its program moves what it still reads."""
    graph = graph_of(name)
    model, sample = example(name)
    for place, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(place % 2 == 0)
    other = graph.with_backward(make_B(model, sample))

    @settings(max_examples=6)
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        draw = random.Random(seed)
        steps = steps_of(graph, draw)
        moves = drawn_moves(graph, steps, draw)
        kept = without_idle_steps(other, steps)
        program = lower_step(other, kept, moves=moves_without_idle_steps(other, steps, moves))
        check_program(other, program)
        same = moves_without_idle_steps(graph, steps, moves)
        if steps == steps_of(graph):
            assert set(same) == set(moves)
        check_program(graph, lower_step(graph, without_idle_steps(graph, steps), moves=same))

    check()
