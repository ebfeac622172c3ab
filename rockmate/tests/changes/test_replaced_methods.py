"""Methods of tensors that a user has replaced, as libraries do to count or to mend them."""

import copy

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


@pytest.mark.parametrize("at", [None, 1])
@pytest.mark.parametrize("name", ["sin", "__mul__", "relu_"])
def test_a_replaced_method_runs_once_a_call(name, at, monkeypatch):
    doubled = _doubled(getattr(torch.Tensor.__base__, name))

    def replace():
        monkeypatch.setattr(torch.Tensor, name, doubled)

    torch.manual_seed(0)
    model, x = nn.Sequential(Wave(), nn.GELU(), Wave()), torch.randn(32, 16)
    twin = copy.deepcopy(model)
    if at is None:
        replace()
    planned = Rockmate(model, x, 0.7, cost="flops")
    ours = _trained(planned, x, replace, at)
    monkeypatch.undo()
    if at is None:
        replace()
    assert all(map(torch.equal, ours, _trained(twin, x, replace, at)))
