"""Plans of captured networks that are no chain of equal blocks: near the bound, or refused."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rotor.models
from oracles.training import assert_trains_like, eager_copy
from rockmate import InfeasibleBudgetError, Rockmate
from rockmate.errors import SolverError
from rockmate.planners import plan
from rockmate.problems.problem import Problem
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.simulate import simulate
from zoo.nets import TinyTransformer, TinyUNet, network


def deep_unet() -> tuple[nn.Module, object]:
    source = torch.Generator().manual_seed(1)
    pixels = torch.randn(4, 3, 64, 64, generator=source)
    return TinyUNet(width=2, depth=5), (pixels, torch.randint(0, 4, (4, 64, 64), generator=source))


def twelve_layers() -> tuple[nn.Module, object]:
    source = torch.Generator().manual_seed(1)
    pair = torch.randn(4, 16, 16, generator=source), torch.randn(4, 12, 16, generator=source)
    return TinyTransformer(width=16, layers=6), pair


class TwoTowers(nn.Module):
    """CLIP: an encoder of text and one of images that meet in the loss alone."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()

        def tower() -> nn.Module:
            layer = nn.TransformerEncoderLayer(width, 2, 4 * width, 0.1, "gelu", batch_first=True)
            return nn.TransformerEncoder(layer, layers)

        self.words, self.patches = nn.Embedding(32, width), nn.Conv2d(3, width, 4, 4)
        self.text, self.image = tower(), tower()
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, words: Tensor, pixels: Tensor) -> Tensor:
        text = self.text(self.words(words)).mean(1)
        image = self.image(self.patches(pixels).flatten(2).transpose(1, 2)).mean(1)
        alike = functional.normalize(text, dim=1) @ functional.normalize(image, dim=1).T
        logits = self.scale.exp() * alike
        pairs = torch.arange(len(words), device=words.device)
        return functional.cross_entropy(logits, pairs) + functional.cross_entropy(logits.T, pairs)


def two_towers() -> tuple[nn.Module, object]:
    source = torch.Generator().manual_seed(1)
    pixels = torch.randn(8, 3, 16, 16, generator=source)
    return TwoTowers(width=32, layers=6), (torch.randint(32, (8, 16), generator=source), pixels)


def densenet() -> tuple[nn.Module, object]:
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return rotor.models.densenet121(num_classes=10), pixels


NETS = {
    "unet of depth 5": deep_unet,
    "transformer 6+6": twelve_layers,
    "densenet-121": densenet,
    "two towers": two_towers,
}


@functools.cache
def captured(name: str) -> Problem:
    torch.manual_seed(0)
    model, sample = NETS[name]() if name in NETS else network(name)
    wrapped = Rockmate(model, sample, "1GiB", cost="flops", self_test=False)
    problem: Problem = wrapped._rockmate.planned.problem
    return problem


def keeping_all(problem: Problem) -> int:
    return simulate(problem, no_recomputation(problem)).peak_bytes


def overhead_of_segments(problem: Problem, budget: int) -> float:
    try:
        return plan(problem, budget, planner="segments", effort="fast").overhead_ms
    except SolverError:  # none of them fits
        return math.inf


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share", "gap"),  # what a machine several times slower than a laptop reaches in time
    [
        ("fno", 0.6, 0.03),
        pytest.param("uno", 0.7, 0.05, marks=pytest.mark.nightly),
        ("unet of depth 5", 0.7, 0.05),
        pytest.param("transformer 6+6", 0.7, 0.03, marks=pytest.mark.nightly),
        pytest.param("densenet-121", 0.7, 0.03, marks=pytest.mark.nightly),
        pytest.param("two towers", 0.6, 0.03, marks=pytest.mark.nightly),
    ],
)
def test_near_the_bound_and_never_behind_plans_of_segments(
    name: str, share: float, gap: float
) -> None:
    problem = captured(name)
    budget = int(share * keeping_all(problem))
    found = plan(problem, budget, effort="fast")
    found.check(problem)
    assert found.peak_bytes <= budget
    assert found.gap is not None
    assert found.gap < gap
    assert found.overhead_ms <= overhead_of_segments(problem, budget)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("densenet-121", marks=pytest.mark.nightly), "two towers"]
)
def test_they_train_with_the_bits_of_eager_within_the_budget(name: str) -> None:
    torch.manual_seed(0)
    model, sample = NETS[name]()
    wrapped = Rockmate(model, sample, 0.6, cost="flops")
    assert_trains_like(wrapped, eager_copy(model), sample)


@pytest.mark.slow
def test_the_refusal_of_the_u_shaped_operator_proves_its_smallest_budget() -> None:
    problem = captured("uno")
    needs = []
    for k in problem.backward_order:
        held = [s for s in problem.storages if k in s.bwd_users or s.is_output]
        node = problem.nodes[k]
        grads = node.grads_before_bytes + node.bwd_peak_bytes
        needs.append(sum(s.size_bytes for s in held) + grads)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(problem, max(needs) - 1, effort="fast")
    # That backward's own input takes more to make again than the backward itself.
    assert 1.1 * max(needs) < caught.value.bound_bytes <= caught.value.minimum_bytes
    assert caught.value.minimum_bytes < 1.005 * caught.value.bound_bytes
    assert plan(problem, caught.value.minimum_bytes, effort="fast").peak_bytes > max(needs)
