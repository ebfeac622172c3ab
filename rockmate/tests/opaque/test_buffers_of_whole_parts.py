"""Buffers that a part that runs whole writes to, read around it: the bits of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor, nn

from oracles.training import measured_peak_bytes
from rockmate import InfeasibleBudgetError, Rockmate

WIDTH, ROWS = 32, 128


class Part(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inner(x))
        for _ in range(int(x.detach().abs().sum().item()) % 3):  # a size that depends on values
            x = x * 1.5
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x.tanh()


class Net(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.part, self.where = Part(), where
        self.again, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.where != "after":
            x = x * (1 + self.part.mean)
        x = self.part(self.down(F.gelu(self.up(x))))
        x = self.again(x)
        if self.where != "before":
            x = x * (1 + self.part.mean.sum())
        return self.out(F.gelu(x).sin()).square().mean()


def one(net: nn.Module, x: Tensor) -> None:
    net(x).backward()


def two_forwards(net: nn.Module, x: Tensor) -> None:
    first, second = net(x), net(x.flip(0))
    first.backward()
    second.backward()


def one_without_gradients(net: nn.Module, x: Tensor) -> None:
    loss = net(x)
    with torch.no_grad():
        net(x.flip(0))
    loss.backward()


def evaluated_first(net: nn.Module, x: Tensor) -> None:
    net.eval()
    first = net(x)
    net.train()
    second = net(x.flip(0))
    first.backward()
    second.backward()


@pytest.mark.parametrize("where", ["before", "after", "both"])
def test_what_runs_again_reads_buffers_of_whole_parts_as_they_were(where: str) -> None:
    torch.manual_seed(0)
    model, x = Net(where), torch.randn(ROWS, WIDTH)
    twin = copy.deepcopy(model)
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(twin, x, 1000)
    planned = Rockmate(twin, x, error.value.minimum_bytes, self_test=False)
    assert planned.plan.opaque == ("part",)
    assert planned.plan.overhead_percent > 0
    steps: list[Callable[[nn.Module, Tensor], None]] = [
        one,
        two_forwards,
        one_without_gradients,
        evaluated_first,
    ]
    for step in steps:
        found = []
        for net, state in ((model, model), (planned, twin)):
            torch.manual_seed(1)
            step(net, torch.randn(ROWS, WIDTH))
            found.append([*(p.grad for p in state.parameters()), *state.buffers()])
        assert all(map(torch.equal, *found)), step.__name__
    assert measured_peak_bytes(planned, (x,), grads_exist=True) <= planned.budget_bytes
