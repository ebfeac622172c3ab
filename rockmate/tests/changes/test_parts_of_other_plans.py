"""What one plan leaves to a part that runs whole, another plan may take for granted."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rockmate import Rockmate


class Gauge:
    def __init__(self) -> None:
        self.value = 0.5


class Part(nn.Module):
    """It decides by a random number where a batch has six rows, and runs whole there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gauge, self.flags = nn.Linear(8, 8), Gauge(), [True]
        self.power, self.left = 2, 1.0

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 6:
            x = x * 2 if random.random() < 0.5 else x * 3
        return self.layer(x) * self.gauge.value**self.power * (2 if self.flags[0] else 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = Part(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(x))


class LeavesWhatItReads(Net):
    """With six rows it sets an attribute; otherwise it reads that."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 6:
            self.part.left = 4.0
            return self.last(x)
        return self.last(x) * self.part.left


CHANGES: dict[str, tuple[type[Net], Callable[[Net], None]]] = {
    "an object": (Net, lambda net: setattr(net.part.gauge, "value", 0.25)),
    "another object": (Net, lambda net: setattr(net.part, "gauge", copy.copy(net.part.gauge))),
    "a number": (Net, lambda net: setattr(net.part, "power", 3)),
    "in a list": (Net, lambda net: net.part.flags.__setitem__(0, False)),
    "what a plan sets": (LeavesWhatItReads, lambda net: setattr(net.part, "left", 5.0)),
}


@pytest.mark.parametrize("first", [4, 6])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_where_another_plan_runs_it_whole(name: str, first: int) -> None:
    kind, change = CHANGES[name]
    torch.manual_seed(0)
    net, sizes = kind(), [first, 10 - first, 4, 4, 6, 6, 4, 4]
    twin = copy.deepcopy(net)
    planned = Rockmate(net, torch.randn(first, 8), 1_000_000, cost="flops", self_test=False)
    for step, size in enumerate([*sizes, 4, 6, 4]):
        if step == len(sizes):
            change(net)
            change(twin)
        x, results = torch.randn(size, 8), []
        for module in (planned, twin):
            random.seed(step)
            results.append(module(x))
            results[-1].sum().backward()
        assert torch.equal(*results)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:
            assert torch.equal(p.grad, q.grad)


def test_plans_of_other_parts_are_kept() -> None:
    net, planned_for = Net(), [4, 6, 4, 6, 4, 6]
    planned = Rockmate(net, torch.randn(4, 8), 1_000_000, cost="flops", self_test=False)
    for size in planned_for:
        planned(torch.randn(size, 8)).sum().backward()
    assert len(planned.plans) <= 3
