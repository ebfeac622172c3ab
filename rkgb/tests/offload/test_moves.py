"""Programs that move storages: same bits, and memory as their statements say, however slow."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.check_program import check_program
from oracles.gradients import gradients_of_module, run_program
from rkgb.capture.record import make_B
from rkgb.device.rng import RngState
from rkgb.graphs.dataflow import B_to_D
from rkgb.graphs.simplified import D_to_S, SimplifiedGraph
from rkgb.published.check import same_bits
from rkgb.run.graph.views import runnable
from rkgb.run.program.lowering import lower_step
from rkgb.run.program.places import Step
from runs.moves import SlowHost, drawn_moves
from zoo.examples import EXAMPLES, example


@functools.cache
def graph_of(name: str) -> SimplifiedGraph:
    model, sample = example(name)
    return runnable(D_to_S(B_to_D(make_B(model, sample)))).graph


def plan(graph: SimplifiedGraph, draw: random.Random) -> list[Step]:
    """Return the steps of a plan with some recomputations."""
    count = len(graph.nodes)
    steps: list[Step] = [
        ("B", k)
        for k in reversed(range(count))
        if graph.nodes[k].backward or graph.nodes[k].hand_overs
    ]
    for _ in range(draw.randrange(4)):
        steps.insert(draw.randrange(len(steps) + 1), ("F", draw.randrange(count)))
    forwards: list[Step] = [("F", k) for k in range(count)]
    return [*forwards, *steps]


@pytest.mark.parametrize("name", EXAMPLES)
def test_moved_storages_have_the_same_bits(name: str) -> None:
    graph = graph_of(name)

    @settings(max_examples=6)
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        draw = random.Random(seed)
        steps = plan(graph, draw)
        moves = drawn_moves(graph, steps, draw)
        program = lower_step(graph, steps, moves=moves)
        check_program(graph, program)
        model, sample = example(name)
        start = RngState.save(torch.device("cpu"))
        expected = gradients_of_module(model, sample)
        start.restore()
        model, sample = example(name)
        start.restore()
        found = run_program(graph, program, model, sample, copies=SlowHost(draw))[1]
        assert all(map(same_bits, found, expected))

    check()
