"""Weights that parts which run whole use several times: autograd adds each use, as in plain."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rockmate import Rockmate
from runs.planned import computing_again


class Decides(nn.Module):
    """Runs whole: it decides by a computed value. It uses its weight several times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.inner, self.times = nn.Linear(8, 8), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.inner(x))
        return x * 0.5 if x.mean() > 100 else x


class Around(nn.Module):
    """Calls a part several times, and uses its weight outside of it, too."""

    def __init__(self, calls: int, times: int, *, outside: bool) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(8, 8), Decides(times)
        self.calls, self.outside = calls, outside

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.calls):
            x = self.part(x)
        return self.part.inner(x) if self.outside else x


class Fewer(Decides):
    """Uses its weight less often where the sample is small: as plain, but for one use alone."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times if x.abs().mean() < 2 else 1):
            x = torch.tanh(self.inner(x))
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "root": lambda: Decides(3),
    "once a call": lambda: Around(3, 1, outside=False),
    "often a call": lambda: Around(1, 3, outside=False),
    "outside, too": lambda: Around(2, 2, outside=True),
    "not as often as the sample": lambda: nn.Sequential(nn.Linear(8, 8), Fewer(3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_several_forwards_before_a_backward(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    sample = torch.randn(16, 8)
    planned = Rockmate(model, sample, 2**20)
    batches = [torch.randn(16, 8), torch.randn(16, 8) * 100, torch.randn(16, 8)]
    for _ in range(5):  # later steps add up where autograd keeps the first gradient
        for one in (planned, plain):
            outs = [one(batch) for batch in batches]
            loss = sum(n * out.square().mean() for n, out in enumerate(outs, 1))
            one.zero_grad()
            loss.backward()
        for (own, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), own


class Tells(nn.Module):
    """Runs whole, and goes by which weights want gradients, as torch's own kernels may.

    It uses a weight that belongs to another module, too.
    """

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.inner, self.others = nn.Linear(8, 8), [other]

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 100:
            x = x * 0.5
        for module in (self.inner, *self.others):
            factors = [2.0 if p.requires_grad else 0.5 for p in module.parameters()]
            x = module(x) * factors[0] + factors[1]
        return x


@pytest.mark.parametrize("unfreezes", [False, True])
@pytest.mark.parametrize("place", range(6))
def test_parameters_that_are_frozen_or_unfrozen_after_planning(place: int, unfreezes: bool) -> None:
    torch.manual_seed(0)
    first = nn.Linear(8, 8)
    model = nn.Sequential(first, Tells(first), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    plain[1].others = [plain[0]]  # type: ignore[assignment]
    every = [list(model.parameters())[place], list(plain.parameters())[place]]
    for p in every:
        p.requires_grad_(not unfreezes)
    planned = Rockmate(model, torch.randn(4, 8), 2**20, self_test=False)
    assert planned.plan.opaque
    for flag in (unfreezes, not unfreezes):
        for p in every:
            p.requires_grad_(flag)
        x = torch.randn(4, 8)
        ours, theirs = planned(x), plain(x)
        assert torch.equal(ours, theirs)
        ours.square().mean().backward()
        theirs.square().mean().backward()
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("unfreezes", [False, True])
@pytest.mark.parametrize("place", range(6))
def test_parameters_that_are_frozen_or_unfrozen_before_their_part_is_computed_again(
    place: int, unfreezes: bool
) -> None:
    """Plain PyTorch adds to them what the forward has asked for, and no more."""
    torch.manual_seed(0)
    first = nn.Linear(8, 8)
    model = nn.Sequential(first, Tells(first), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    plain[1].others = [plain[0]]  # type: ignore[assignment]
    every = [list(model.parameters())[place], list(plain.parameters())[place]]
    for p in every:
        p.requires_grad_(not unfreezes)
    with computing_again():
        planned = Rockmate(model, torch.randn(4, 8), 2**20, cost="flops", self_test=False)
    assert planned.plan.overhead_ms > 0
    for _ in range(2):
        x = torch.randn(4, 8)
        outs = [planned(x), plain(x)]
        for p in every:
            p.requires_grad_(unfreezes)
        for out in outs:
            out.square().mean().backward()
        assert_same_gradients(model, plain)
        for p in every:
            assert p.requires_grad == unfreezes
            p.requires_grad_(not unfreezes)
