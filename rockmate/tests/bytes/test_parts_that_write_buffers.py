"""Parts that run whole and write to buffers: what a recomputation copies of them is predicted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rockmate import InfeasibleBudgetError, Rockmate


class Part(nn.Module):
    """It keeps as many bytes in its buffer as in an activation, and decides by values."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(16, 16), nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0).expand_as(self.mean), 0.1)
        if x.mean() > 100:
            x = x * 0.5
        return self.dropout(torch.tanh(self.linear(x * (1 + self.mean.mean()))))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part, linear in zip(self.parts, self.linears, strict=True):
            x = torch.sin(linear(part(x)))
        return x


def least_bytes() -> int:
    with pytest.raises(InfeasibleBudgetError) as refusal:
        Rockmate(Chain(), torch.randn(64, 16), 100)
    return refusal.value.minimum_bytes


@pytest.mark.parametrize(("part_of_least", "most_runs"), [(1.0, 3), (1.2, 2), (1.5, 1)])
def test_the_peak_is_as_predicted_however_often_a_part_runs(
    part_of_least: float, most_runs: int
) -> None:
    torch.manual_seed(0)
    model = Chain()
    rk = Rockmate(model, torch.randn(64, 16), int(part_of_least * least_bytes()))
    assert rk.measured_peak_bytes == rk.plan.peak_bytes
    runs = [node for kind, node in rk.plan.steps if kind == "F"]
    assert max(map(runs.count, runs)) == most_runs


class Net(nn.Module):
    """Its peak lies in the recomputation of the part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.dropout, self.last = nn.Dropout(0.2), nn.Linear(8, 8)
        self.whole = Whole(self.first, self.normed, self.dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.whole(x)
        t = h * 0.5
        return self.last(torch.tanh(t) * t) + h


class Whole(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        first, normed, dropout = self.layers
        x = normed(first(x))
        if x.mean() > 100:
            x = x * 0.5
        dropped: Tensor = dropout(x * 2)
        return dropped


def test_a_recomputation_takes_no_more_than_the_copies_of_the_first_run() -> None:
    def planned(budget_bytes: int) -> Rockmate:
        torch.manual_seed(0)
        return Rockmate(Net(), torch.randn(64, 5, 8), budget_bytes, planner="recompute_all")

    with pytest.raises(InfeasibleBudgetError) as refusal:
        planned(100)
    rk = planned(refusal.value.minimum_bytes)
    assert rk.measured_peak_bytes == rk.plan.peak_bytes == refusal.value.minimum_bytes
