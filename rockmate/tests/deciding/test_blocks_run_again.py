"""Blocks of a root that decides by values run again as they ran, whatever is outside by then."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rockmate import InfeasibleBudgetError, Rockmate

FACTOR = 1.0
FACTORS = [1.0]
BY_NAME: dict[str, Any] = {"factor": 1.0}
NUMBERS = itertools.count(1)


class Owner:
    factor = 1.0


def _helper() -> float:
    return FACTOR


READS = {
    "global": lambda: FACTOR,
    "list": lambda: FACTORS[-1],
    "dict": lambda: BY_NAME["factor"],
    "class": lambda: Owner.factor,
    "helper": lambda: _helper(),
    "iterator": lambda: 1.0 / next(NUMBERS),
}


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(24, 96), nn.Linear(96, 24), kind

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if hidden.sum().item() > 1e9:  # so that it runs whole
            hidden = hidden * 2
        return x + self.last(torch.sin(hidden * READS[self.kind]()))


class Root(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.sum().item() > 1e9:
                x = x * 2
        return x


def _set(value: float) -> None:
    global FACTOR, NUMBERS
    FACTOR = Owner.factor = BY_NAME["factor"] = FACTORS[-1] = value
    NUMBERS = itertools.count(int(value))


@pytest.mark.parametrize("kind", list(READS))
def test_a_second_run_reads_what_the_first_one_read(kind: str) -> None:
    torch.manual_seed(0)
    _set(1.0)
    model, x = Root(kind), torch.randn(64, 24)
    twin = copy.deepcopy(model)
    try:
        module = Rockmate(model, x, 1, cost="flops")
    except InfeasibleBudgetError as error:
        module = Rockmate(model, x, error.minimum_bytes, cost="flops")
    for value in (1.0, 2.0, 5.0):
        for net in (module, twin):
            _set(value)
            net.zero_grad()
            result = net(x)
            after = next(NUMBERS) if kind == "iterator" else 0
            _set(7.0)  # before the backward, which runs blocks again
            result.square().sum().backward()
            assert next(NUMBERS) == 7
            assert after in (0, value + 4)
        assert_same_gradients(module, twin)
