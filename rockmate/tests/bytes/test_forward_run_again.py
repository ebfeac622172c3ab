"""At the smallest budget of eager attention, nodes run again before the forward has ended."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rockmate import InfeasibleBudgetError, Rockmate


class Attention(nn.Module):
    """Whole matrices of scores, for which the values of all heads wait."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        weights = self.drop(torch.softmax(q @ k.transpose(-1, -2) * 0.35 + 1.0, -1))
        return x + self.out((weights @ v).transpose(1, 2).reshape(x.shape))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 32)
        self.layers = nn.Sequential(Attention(32, 8), Attention(32, 8))
        self.head = nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.head(self.layers(self.words(ids)))
        return functional.cross_entropy(hidden.flatten(0, 1), ids.flatten())


def test_the_smallest_budget_has_the_bits_of_eager() -> None:
    torch.manual_seed(0)
    model, ids = Model(), torch.randint(0, 32, (2, 96))
    plain = copy.deepcopy(model)
    with pytest.raises(InfeasibleBudgetError) as caught:
        Rockmate(model, ids, 1000, cost="flops")
    error = caught.value
    assert error.minimum_bytes < 1.01 * error.bound_bytes
    planned = Rockmate(model, ids, error.minimum_bytes, cost="flops")
    forward, _ = planned.plan.source().split("def backward")
    assert " again: " in forward
    losses = []
    for net in (plain, planned):
        torch.manual_seed(1)
        losses.append(net(ids))
        losses[-1].backward()
    assert torch.equal(*losses)
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in pairs)
    assert planned.measured_peak_bytes <= planned.plan.peak_bytes <= error.minimum_bytes


class Refined(nn.Module):
    """Attends several times to the same keys and values, as slot attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.slots = nn.Parameter(torch.randn(1, 3, 8))

    def forward(self, x: Tensor) -> Tensor:
        slots = self.slots.expand(len(x), -1, -1)
        keys, values = self.key(x), self.value(x)
        for _ in range(3):
            weights = (self.query(slots) @ keys.mT).softmax(1)
            slots = (weights / weights.sum(-1, keepdim=True)) @ values + slots
        return slots


@pytest.mark.parametrize("budget", [0.8, 0.7, "smallest"])
def test_no_backward_keeps_views_of_what_runs_again(budget: float | str) -> None:
    torch.manual_seed(0)
    model, x = Refined(), torch.randn(2, 20, 8)
    plain = copy.deepcopy(model)
    if isinstance(budget, str):
        with pytest.raises(InfeasibleBudgetError) as caught:
            Rockmate(model, x, 1, cost="flops")
        budget = int(caught.value.minimum_bytes)
    rk = Rockmate(model, x, budget, cost="flops")  # the self-test compares the peaks
    assert rk.measured_peak_bytes == rk.plan.peak_bytes
    for module in (rk, plain):
        module(x).square().sum().backward()
    for own, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, theirs.grad)
