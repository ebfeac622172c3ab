"""What the Python of a backward reads may change between steps."""

import pytest
import torch
from torch import nn

import rockmate
from rockmate import Rockmate

SCALE = 1.0
TABLE = torch.ones(8)
CONFIG = {"scale": 1.0}


def _helper():
    return CONFIG["scale"]


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()


class _Number(_Identity):
    @staticmethod
    def backward(ctx, grad):
        return grad * SCALE


class _Called(_Identity):
    @staticmethod
    def backward(ctx, grad):
        return grad * _helper()


class _Tensor(_Identity):
    @staticmethod
    def backward(ctx, grad):
        return grad * TABLE


class _Content(_Identity):
    @staticmethod
    def backward(ctx, grad):
        return grad * float(TABLE[0])


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x):
        return self.b(torch.relu(self.function.apply(self.a(x))))


def _in_place(by):
    TABLE.add_(by)
    CONFIG["scale"] += by
    globals()["SCALE"] = SCALE + by


def _replaced(by):
    globals().update(TABLE=TABLE + by, CONFIG={"scale": CONFIG["scale"] + by}, SCALE=SCALE + by)


@pytest.mark.parametrize("change", [_in_place, _replaced])
@pytest.mark.parametrize("function", [_Number, _Called, _Tensor, _Content])
def test_it_may_change_between_steps(function, change, monkeypatch):
    x, found = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), []
    for is_planned in (False, True):
        monkeypatch.setitem(globals(), "SCALE", 1.0)
        monkeypatch.setitem(globals(), "TABLE", torch.ones(8))
        monkeypatch.setitem(globals(), "CONFIG", {"scale": 1.0})
        torch.manual_seed(2)
        net = Net(function)
        module = Rockmate(net, x, "1MiB", cost="flops") if is_planned else net
        steps = []
        for by in (0, 1, 0, 1):
            change(by)
            net.zero_grad()
            module(x).square().sum().backward()
            steps.append([parameter.grad.clone() for parameter in net.parameters()])
        found.append(steps)
    for ours, theirs in zip(*found, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(found[0][0][0], found[0][1][0])


@pytest.mark.parametrize("function", [_Number, _Called, _Tensor])
def test_what_changes_between_forward_and_backward_is_refused(function, monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.setitem(globals(), "TABLE", torch.ones(8))
    monkeypatch.setitem(globals(), "CONFIG", {"scale": 1.0})
    net, x = Net(function), torch.randn(4, 8)
    planned = Rockmate(net, x, "1MiB", cost="flops")
    y = planned(x)
    _replaced(1)
    with pytest.raises(rockmate.RockmateError, match="changed"):
        y.sum().backward()
    net.zero_grad()
    planned(x).sum().backward()
    ours = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    with rockmate.plain():
        planned(x).sum().backward()
    assert all(map(torch.equal, ours, (parameter.grad for parameter in net.parameters())))
