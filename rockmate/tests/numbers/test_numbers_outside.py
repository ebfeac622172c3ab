"""Numbers outside of the module that are others at every step."""

import copy
import logging
import math

import pytest
import torch
from torch import nn

from rockmate import Rockmate

STEP = 0
CONFIG = {"scale": 0.0}


class Held:
    scale = 0.0


HELD = Held()


class Scaled(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.linear, self.read = nn.Linear(64, 64), read

    def forward(self, x):
        return self.linear(x) * (1 + self.read())


class Root(nn.Sequential):
    """Reads a number itself."""

    def forward(self, x):
        return super().forward(x) * (1 + STEP)


def _network(first):
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(first, nn.Sequential(*layers), nn.Sequential(*copy.deepcopy(layers)))


def _closure():
    value = 0.0

    def change(to):
        nonlocal value
        value = to

    return lambda: value, change


PLACES = {
    "global": lambda: (lambda: STEP, lambda to: globals().update(STEP=to)),
    "in a dict": lambda: (lambda: CONFIG["scale"], lambda to: CONFIG.update(scale=to)),
    "of an object": lambda: (lambda: HELD.scale, lambda to: setattr(HELD, "scale", to)),
    "closure": _closure,
}


def _differ(module, net, plain, x):
    found = []
    for one, owner in ((module, net), (plain, plain)):
        owner.zero_grad()
        y = one(x)
        y.sum().backward()
        found.append([y, *(parameter.grad for parameter in owner.parameters())])
    return [not torch.equal(a, b) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("place", PLACES)
def test_after_some_values_its_reader_runs_whole(place, caplog):
    read, change = PLACES[place]()
    torch.manual_seed(0)
    net, x = _network(Scaled(read)), torch.randn(16, 64)
    plain = copy.deepcopy(net)
    change(0)
    planned = Rockmate(net, x, 0.8, cost="flops")
    with caplog.at_level(logging.WARNING, logger="rockmate"):
        for step in range(12):
            change(math.sin(step))
            assert not any(_differ(planned, net, plain, x))
    assert len(planned.plans) == 5
    assert [record.args[1] for record in caplog.records] == ["'0'"]
    assert "test_numbers_outside.py:" in caplog.text


def test_a_root_that_reads_one_is_planned_by_blocks(monkeypatch, caplog):
    monkeypatch.setitem(globals(), "STEP", 0)
    torch.manual_seed(0)
    net, x = Root(*_network(nn.Linear(64, 64))), torch.randn(16, 64)
    plain = copy.deepcopy(net)
    planned = Rockmate(net, x, 0.8, cost="flops")
    budget = planned.budget_bytes
    with caplog.at_level(logging.WARNING, logger="rockmate"):
        for step in range(8):
            monkeypatch.setitem(globals(), "STEP", step)
            assert not any(_differ(planned, net, plain, x))
    assert planned.budget_bytes == budget
    assert [record.args[1] for record in caplog.records] == ["'(root)'"]


def test_strict_records_every_value(monkeypatch):
    read, change = PLACES["in a dict"]()
    net, x = _network(Scaled(read)), torch.randn(16, 64)
    plain = copy.deepcopy(net)
    planned = Rockmate(net, x, 0.8, cost="flops", strict=True)
    for step in range(7):
        change(step + 1)
        assert not any(_differ(planned, net, plain, x))
    assert len(planned.plans) == 8


class Advancing(nn.Module):
    """A root that advances an iterator, around one chain of layers."""

    def __init__(self):
        super().__init__()
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
        self.chain, self.steps = nn.Sequential(*layers), iter(range(1, 100))

    def forward(self, x):
        return self.chain(x) * next(self.steps)


def test_a_root_that_advances_an_iterator_is_planned_by_its_only_block():
    torch.manual_seed(0)
    net, x = Advancing(), torch.randn(256, 64)
    plain = copy.deepcopy(net)
    planned = Rockmate(net, x, 0.7, cost="flops")
    for _ in range(4):
        assert not any(_differ(planned, net, plain, x))
