"""`torch.nn.utils.parametrize.cached` around calls, which share what parametrizations compute."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rockmate import Rockmate


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def _gradients(*, is_planned: bool, shares: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    net: nn.Module = model
    if is_planned:
        net = Rockmate(model, torch.randn(16, 8), "1MB", cost="flops")
    found = []
    for step in range(3):
        x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(step))
        with parametrize.cached() if shares else contextlib.nullcontext():
            (net(x[0]) + net(x[1])).square().sum().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


def test_calls_that_share_them_run_plain() -> None:
    plain = _gradients(is_planned=False, shares=True)
    with pytest.warns(RuntimeWarning, match="Calls share what parametrizations compute"):
        found = _gradients(is_planned=True, shares=True)
    assert all(map(torch.equal, found, plain))
    apart = _gradients(is_planned=False, shares=False)
    assert not all(map(torch.equal, apart, plain)), "it would make no difference"
    assert all(map(torch.equal, _gradients(is_planned=True, shares=False), apart))
