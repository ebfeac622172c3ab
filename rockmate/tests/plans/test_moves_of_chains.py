"""Plans of chains that move, against POFO's dynamic program, which shares nothing with them."""

from __future__ import annotations

import math
import random

import pytest

from oracles.moving_chain import Layer, least_overhead_ms, problem_of
from oracles.pofo import Pofo
from rockmate.planning import Link, Move, plan
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Step
from rockmate.solvers.bound import lower_bound


@pytest.mark.parametrize("seed", range(6))
def test_chains_against_the_program_of_pofo(seed: int) -> None:
    """Its account of a schedule is the simulator's. No bound is above it, and no plan much slower.

    What POFO cannot say, copies that come in before they must, is tried on the shorter chains.
    """
    draw = random.Random(seed)
    layers = [
        Layer(draw.randint(1, 4), draw.randint(2, 8), 8 * draw.randint(1, 5), draw.randint(1, 8))
        for _ in range(draw.randint(5, 8))
    ]
    out_rate = draw.choice((1, 2, 4))
    in_rate = out_rate * draw.choice((1, 2))
    link = Link(out_rate, in_rate)
    problem = problem_of(layers, link)
    peak = simulate(problem, no_recomputation(problem)).peak_bytes
    for part in (0.7, 0.55):
        budget = int(part * peak)
        extra_ms, ops, away = Pofo(layers, budget, out_rate, in_rate).best()
        if extra_ms == math.inf:
            continue
        steps = tuple(Step(kind, layer) for kind, layer in ops)
        moves = tuple(Move(k, k, gone, back) for k, (gone, back) in sorted(away.items()))
        timeline = simulate(problem, steps, moves)
        assert timeline.peak_bytes <= budget
        assert timeline.overhead_ms == pytest.approx(extra_ms)
        assert lower_bound(problem, budget, cuts=2) <= extra_ms + 1e-6
        if len(layers) < 7:
            assert least_overhead_ms(layers, budget, link) <= extra_ms + 1e-6
        found = plan(problem, budget, effort="fast")
        assert found.overhead_ms <= extra_ms + 0.02 * problem.base_time_ms
