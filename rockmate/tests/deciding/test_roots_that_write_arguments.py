"""Roots that write to their arguments and decide: planned, and planning leaves arguments alone."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rockmate
from oracles.decisions import peak, seed
from oracles.training import assert_same_gradients
from rkgb import SideEffectError
from rockmate import Rockmate
from zoo.deciding import Depth, Layer, rows


class Masking(nn.Module):
    """Overwrites some of its features, and has layers that are left out by chance."""

    def __init__(self, *, by_numpy: bool) -> None:
        super().__init__()
        self.inner, self.by_numpy = Depth(layers=3), by_numpy

    def forward(self, x: Tensor) -> Tensor:
        first = int(np.random.randint(4)) if self.by_numpy else 2
        x[:, first : first + 2] = 0
        x.mul_(1.5)
        return self.inner(x)


def outcome(model: nn.Module, batch: Tensor, number: int) -> tuple[Any, ...]:
    seed(number)
    np.random.seed(number)
    loss = model(batch)
    loss.backward()
    states = random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[2]
    return loss.item(), batch.tolist(), states


@pytest.mark.parametrize(("by_numpy", "budget"), [(False, 0.85), (True, "200kB")])
def test_planning_leaves_the_sample_and_steps_write_to_arguments(
    by_numpy: bool, budget: float | str
) -> None:
    torch.manual_seed(0)
    model = Masking(by_numpy=by_numpy).train()
    twin, sample = copy.deepcopy(model), rows(0)
    before, version = sample.clone(), sample._version
    seed(0)  # no layer is left out
    rk = Rockmate(model, sample, budget, cost="flops")
    assert torch.equal(sample, before)
    assert sample._version == version
    assert rk.plan.overhead  # something is computed again
    for step in range(3):
        ours, theirs = (outcome(m, rows(step), step) for m in (rk, twin))
        assert ours == theirs
        assert_same_gradients(rk, twin)
    assert peak(rk, rows(0)) <= rk.budget_bytes


def test_a_root_without_blocks_is_refused_in_the_words_of_its_recording_or_plain() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2 if np.random.rand() < 2 else 1)
            return (x * self.weight).sum()

    sample = torch.ones(4, 8)
    with pytest.raises(SideEffectError, match="numpy's random numbers"):
        Rockmate(Alone(), sample, 0.9, cost="flops")
    assert torch.equal(sample, torch.ones(4, 8))
    rk, twin = Rockmate(Alone(), sample, 1.0, cost="flops"), Alone()
    assert torch.equal(sample, torch.ones(4, 8))
    for step in range(2):
        ours, theirs = (outcome(m, torch.ones(4, 8), step) for m in (rk, twin))
        assert ours == theirs
        assert_same_gradients(rk, twin)


def test_planning_blocks_leaves_the_sample() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x[:, :2] = 0
            x.mul_(1.5)
            for layer in self.layers:
                x = x + layer(x)
            return x.square().mean()

    torch.manual_seed(0)
    model, sample = Root().train(), rows(0)
    twin, before = copy.deepcopy(model), sample.clone()
    rockmate.apply_to_blocks(model, sample, 0.8, cost="flops")
    assert torch.equal(sample, before)
    assert outcome(model, rows(1), 1) == outcome(twin, rows(1), 1)
    assert_same_gradients(model, twin)
