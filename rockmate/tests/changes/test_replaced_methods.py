"""Methods and functions of torch that a user has replaced, as libraries do to mend them."""

import copy
import functools

import pytest
import torch
from torch import nn

from rockmate import Rockmate


class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.down((self.up(x).sin() * 3.0).relu_())


def _doubled(original):
    return lambda tensor, *args: original(tensor, *args).div(0.5)


def _trained(model, x, replace, at):
    found = []
    for step in range(4):
        if step == at:
            replace()
        model.zero_grad()
        y = model(x)
        y.square().mean().backward()
        found += [y.detach(), *(p.grad.clone() for p in model.parameters())]
    return found


def _assert_trains_alike(model, budget, replace, at, monkeypatch):
    """Train it and a plain twin; the function is replaced before step `at`, or before planning."""
    twin, x = copy.deepcopy(model), torch.randn(32, 16)
    if at is None:
        replace()
    planned = Rockmate(model, x, budget, cost="flops")
    ours = _trained(planned, x, replace, at)
    monkeypatch.undo()
    if at is None:
        replace()
    assert all(map(torch.equal, ours, _trained(twin, x, replace, at)))


@pytest.mark.parametrize("at", [None, 1])
@pytest.mark.parametrize("name", ["sin", "__mul__", "relu_"])
def test_a_replaced_method_runs_once_a_call(name, at, monkeypatch):
    doubled = _doubled(getattr(torch.Tensor.__base__, name))

    def replace():
        monkeypatch.setattr(torch.Tensor, name, doubled)

    torch.manual_seed(0)
    _assert_trains_alike(nn.Sequential(Wave(), nn.GELU(), Wave()), 0.7, replace, at, monkeypatch)


class Normed(nn.Module):
    """Calls functions that torch has written in Python, so that a watch calls them once more."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        return nn.functional.relu(self.linear(self.norm(x))).norm(dim=1)


_relu, _layer_norm, _norm = nn.functional.relu, nn.functional.layer_norm, torch.Tensor.norm


@functools.wraps(_layer_norm)
def _wrapped(x, *args, **kwargs):
    return _layer_norm(x * 2, *args, **kwargs) + 1


REPLACED = {
    "a lambda that takes less": (nn.functional, "relu", lambda x: _relu(x) + 0.1),
    "a wrapper": (nn.functional, "layer_norm", _wrapped),
    "a partial function": (
        nn.functional,
        "layer_norm",
        functools.partial(lambda add, x, *args: _layer_norm(x, *args) + add, 0.5),
    ),
    "a method in Python": (torch.Tensor, "norm", lambda x, **options: _norm(x, **options) + 1),
}


@pytest.mark.parametrize("at", [None, 1])
@pytest.mark.parametrize("case", REPLACED)
def test_a_replaced_function_runs_once_a_call(case, at, monkeypatch):
    def replace():
        monkeypatch.setattr(*REPLACED[case])

    torch.manual_seed(0)
    _assert_trains_alike(Normed(), 1.0, replace, at, monkeypatch)
