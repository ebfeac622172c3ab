"""Forwards that keep the gradient of what they compute: the part that does runs whole."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rockmate import Rockmate


class Probe(nn.Module):
    """Keeps what it makes, and its gradient."""

    kept: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.linear(x)
        if self.kept.requires_grad:
            self.kept.retain_grad()
        y: Tensor = self.kept.sin()
        return y


def test_the_gradient_is_there_after_each_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), Probe(), nn.Tanh(), nn.Linear(16, 4))
    twin = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(8, 16), "1MiB", cost="flops")
    for _ in range(3):
        x = torch.randn(8, 16)
        for module in (planned, twin):
            module.zero_grad()
            module(x).square().sum().backward()
        assert_same_gradients(model, twin)
        assert torch.equal(model[2].kept.grad, twin[2].kept.grad)
