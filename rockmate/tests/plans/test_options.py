"""Blocks, their classes, and their options."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from oracles.best_plan import exhaustive_search
from rockmate.errors import InvalidPlanError
from rockmate.options.options import Grid, block_options, boxed, measure_option
from rockmate.problems.blocks import (
    find_cuts,
    make_blocks,
    merge_repeated,
    pinned_candidates,
    reserved_bytes,
)
from rockmate.problems.problem import Node, Problem, Storage
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.simulate import simulate
from rockmate.solvers import block_solver
from zoo.problems import gpt_problem, random_problem, unet_problem


@pytest.mark.parametrize("seed", range(60))
def test_a_cut_is_crossed_by_one_storage(seed: int) -> None:
    problem = random_problem(seed, 8)
    cuts = find_cuts(problem)
    for c in range(len(problem.nodes) - 1):
        forward = set()
        backward = set()
        for index, storage in enumerate(problem.storages):
            if storage.producer <= c and not storage.is_output:
                if any(u > c for u in storage.fwd_users):
                    forward.add(index)
                if any(u > c for u in storage.bwd_users):
                    backward.add(index)
        assert (c in cuts) == (len(forward) <= 1 and backward <= forward)


def test_equal_layers_share_a_class() -> None:
    problem = gpt_problem(12)
    fine = make_blocks(problem, find_cuts(problem))
    assert len(fine) == 30
    assert len({block.class_id for block in fine}) == 8
    merged = make_blocks(problem, merge_repeated(fine, 14))
    assert len(merged) == 13
    assert len({block.class_id for block in merged}) == 3
    assert [b.first for b in merged[1:]] == [b.end for b in merged[:-1]]


def test_gradients_that_wait_for_other_layers_do_not_make_layers_unlike() -> None:
    """As those of each layer's cache: a layer's backward finds those of all layers before it."""
    plain = gpt_problem(12)
    without = make_blocks(plain, find_cuts(plain))
    nodes = list(plain.nodes)
    for number, block in enumerate(without):
        for k in range(block.first, block.end):
            more = nodes[k].grads_before_bytes + 1000 * number
            nodes[k] = dataclasses.replace(nodes[k], grads_before_bytes=more)
    problem = dataclasses.replace(plain, nodes=tuple(nodes))
    blocks = make_blocks(problem, find_cuts(problem))
    assert [b.class_id for b in blocks] == [b.class_id for b in without]
    assert [b.waiting_bytes for b in blocks] == [
        b.waiting_bytes + 1000 * number for number, b in enumerate(without)
    ]


def test_a_mask_read_by_every_layer_is_pinned() -> None:
    layers = 20
    nodes = [Node("mask", 1.0, has_backward=False)]
    storages = [Storage("m", 5, 0, tuple(range(1, layers + 1)), tuple(range(1, layers + 1)))]
    for k in range(1, layers + 1):
        nodes.append(Node(f"n{k}", 1.0, 1.0, True, 10, 10, 10, 10))
        users = (k + 1,) if k < layers else ()
        storages.append(Storage(f"s{k}", 10, k, users, users, is_output=k == layers))
    problem = Problem(tuple(nodes), tuple(storages))
    assert find_cuts(problem) == [0]
    pinned = pinned_candidates(problem, 10)
    assert pinned == [frozenset(), frozenset({0})]
    assert len(find_cuts(problem, pinned[1])) == layers
    assert reserved_bytes(problem, pinned[1]) == 5 + 10
    assert pinned_candidates(problem, 4) == [frozenset()]


def test_options_are_exact_and_none_is_dominated() -> None:
    problem = gpt_problem(3)
    for block in make_blocks(problem, find_cuts(problem)):
        options = block_options(block.local, block_solver("cp-sat", 0.1), Grid(3, 4))
        assert min(option.overhead_ms for option in options) == 0
        for option in options:
            assert measure_option(block.local, option.steps) == option
            assert option.saved_bytes >= block.boundary_bytes
            # the box is a constraint of the local problem, and the option fits into its own
            peak = max(option.fwd_peak_bytes, option.bwd_peak_bytes)
            simulate(boxed(block.local, peak, option.saved_bytes), option.steps, budget_bytes=peak)
            with pytest.raises(InvalidPlanError, match="end of forward"):
                simulate(
                    boxed(block.local, peak, option.saved_bytes - 1),
                    option.steps,
                    budget_bytes=peak,
                )
        for a, b in itertools.permutations(options, 2):
            assert not (
                a.overhead_ms <= b.overhead_ms
                and a.saved_bytes <= b.saved_bytes
                and a.fwd_peak_bytes <= b.fwd_peak_bytes
                and a.bwd_peak_bytes <= b.bwd_peak_bytes
            )


def test_the_option_of_a_box_is_its_optimum() -> None:
    """Of all schedules that save and reach no more, none is faster: exhaustive search says so."""
    problem = random_problem(11, 5, states=False)
    (block,) = make_blocks(problem, [])
    options = block_options(block.local, block_solver("cp-sat", 1.0), Grid(4, 4))
    assert len(options) > 1
    for option in options:
        peak = max(option.fwd_peak_bytes, option.bwd_peak_bytes)
        box = boxed(block.local, peak, option.saved_bytes)
        oracle = exhaustive_search(box, peak, ascending=True, max_runs=3)
        assert oracle is not None
        assert oracle[0] <= option.overhead_ms


def test_outputs_inside_a_block_weigh_nothing_there() -> None:
    problem = unet_problem(3)
    total = sum(s.size_bytes for s in problem.storages if s.is_output)
    assert reserved_bytes(problem) == total
    everything = simulate(problem, no_recomputation(problem))
    (block,) = make_blocks(problem, [])
    local = simulate(block.local, no_recomputation(block.local))
    assert local.peak_bytes <= everything.peak_bytes
