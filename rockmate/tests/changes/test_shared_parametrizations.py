"""Parametrizations that come and go, and `parametrize.cached`, by which calls share results."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from oracles.training import assert_same_gradients
from rockmate import Rockmate, apply


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


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("root", [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())])
def test_a_module_that_gets_a_parametrization_later_is_planned_with_it(
    root: nn.Module, in_place: bool
) -> None:
    """Torch gives a module that it parametrizes another class, which derives from a planned one."""
    model, plain = copy.deepcopy(root), copy.deepcopy(root)
    sample = torch.randn(4, 8)
    if in_place:
        apply(model, sample, 1 << 20, progress=False)
    planned = model if in_place else Rockmate(model, sample, 1 << 20, progress=False)

    def assert_same_step() -> None:
        x = torch.randn(4, 8)
        results = [module(x) for module in (planned, plain)]
        assert torch.equal(*results)
        for result, module in zip(results, (model, plain), strict=True):
            module.zero_grad()
            result.square().mean().backward()
        assert_same_gradients(model, plain)

    layers = [
        one if isinstance(one, nn.Linear) else one.get_submodule("0") for one in (model, plain)
    ]
    for change in (
        lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
        lambda layer: parametrize.remove_parametrizations(layer, "weight"),
    ):
        assert_same_step()
        for layer in layers:
            change(layer)
        assert_same_step()
