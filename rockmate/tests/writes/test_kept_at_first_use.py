"""What a first forward keeps for later ones (cached properties, functions made once) is kept."""

import copy
import functools

import pytest
import torch
from torch import nn

from oracles.training import assert_same_gradients
from rockmate import Rockmate


class Rate:
    factor = 0.5

    @functools.cached_property
    def kept(self):
        return self.factor * 2


RATE = Rate()


def _made_once():
    if not hasattr(_made_once, "scale"):
        factor = Rate.factor
        _made_once.scale = lambda: factor * 2
    return _made_once.scale()


class Scaled(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.linear, self.read = nn.Linear(16, 16), read
        self.rate = Rate()

    @functools.cached_property
    def own(self):
        return Rate.factor * 2

    def forward(self, x):
        return self.linear(x) * self.read(self)


READS = {
    "property of an object": lambda _: RATE.kept,
    "property of the module's object": lambda module: module.rate.kept,
    "property of the module": lambda module: module.own,
    "function made once": lambda _: _made_once(),
}


def _begin():
    Rate.factor = 0.5
    vars(RATE).pop("kept", None)
    vars(_made_once).pop("scale", None)


def _trained(model, x, changes):
    """Return the model's outcome at each step, where the factor is changed before some."""
    found = []
    for step in range(5):
        Rate.factor = 3.0 if step in changes else Rate.factor
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        found += [y.detach(), *(p.grad.clone() for p in model.parameters())]
    return found


@pytest.mark.parametrize("changes", [(0,), (2,)])
@pytest.mark.parametrize("name", READS)
def test_what_the_first_use_found_is_used_by_later_steps(name, changes):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)]
    model, x = nn.Sequential(*layers, Scaled(READS[name]), nn.Linear(16, 16)), torch.randn(64, 16)
    twin = copy.deepcopy(model)
    _begin()
    expected = _trained(twin, x, changes)
    _begin()
    planned = Rockmate(model, x, 0.8, cost="flops")
    assert all(map(torch.equal, _trained(planned, x, changes), expected))
    assert_same_gradients(model, twin)
    _begin()
