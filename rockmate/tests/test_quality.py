"""Plans of captured networks that are no chain of equal blocks: near the bound, or refused."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from rockmate import InfeasibleBudgetError, Rockmate
from rockmate.planners import plan
from rockmate.planners.simple import no_recomputation
from rockmate.problem import Problem
from rockmate.simulate import simulate
from rockmate.testing_nets import TinyTransformer, TinyUNet, network


def deep_unet() -> tuple[nn.Module, object]:
    source = torch.Generator().manual_seed(1)
    pixels = torch.randn(4, 3, 64, 64, generator=source)
    return TinyUNet(width=2, depth=5), (pixels, torch.randint(0, 4, (4, 64, 64), generator=source))


def twelve_layers() -> tuple[nn.Module, object]:
    source = torch.Generator().manual_seed(1)
    pair = torch.randn(4, 16, 16, generator=source), torch.randn(4, 12, 16, generator=source)
    return TinyTransformer(width=16, layers=6), pair


NETS = {"unet of depth 5": deep_unet, "transformer 6+6": twelve_layers}


@functools.cache
def captured(name: str) -> Problem:
    torch.manual_seed(0)
    model, sample = NETS[name]() if name in NETS else network(name)
    wrapped = Rockmate(model, sample, "1GiB", cost="flops", self_test=False)
    problem: Problem = vars(wrapped)["_plans"][0].calibration.problem
    return problem


def keeping_all(problem: Problem) -> int:
    return simulate(problem, no_recomputation(problem)).peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share", "gap"),
    [
        ("fno", 0.6, 0.001),
        ("uno", 0.7, 0.03),
        ("unet of depth 5", 0.7, 0.02),
        ("transformer 6+6", 0.7, 0.01),
    ],
)
def test_near_the_bound_and_ahead_of_plans_of_segments(name: str, share: float, gap: float) -> None:
    problem = captured(name)
    budget = int(share * keeping_all(problem))
    found = plan(problem, budget, effort="fast")
    found.check(problem)
    assert found.peak_bytes <= budget
    assert found.gap is not None
    assert found.gap < gap
    segments = plan(problem, budget, planner="segments", effort="fast")
    assert found.overhead_ms < 0.9 * segments.overhead_ms


def test_the_smallest_budget_of_the_u_shaped_operator_is_what_one_backward_needs() -> None:
    problem = captured("uno")
    needs = []
    for k in problem.backward_order:
        held = [s for s in problem.storages if k in s.bwd_users or s.is_output]
        node = problem.nodes[k]
        grads = node.grads_before_bytes + node.bwd_peak_bytes
        needs.append(sum(s.size_bytes for s in held) + grads)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(problem, max(needs) - 1, effort="fast")
    assert caught.value.minimum_bytes == max(needs)
