"""Modules that keep a tensor with history for the next step, wherever they keep it."""

import copy
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rkgb import OpaquePieceError
from rockmate import Rockmate


class _Kept(nn.Module):
    """Adds a decayed state of the last step, and keeps the new one with its graph."""

    def __init__(self):
        super().__init__()
        self.put(torch.zeros(4, 8))

    def forward(self, x):
        state = 0.5 * self.get().detach() + x
        self.put(state)
        return state


class Attribute(_Kept):
    def put(self, value):
        self.state = value

    def get(self):
        return self.state


class Buffer(Attribute):
    def __init__(self):
        nn.Module.__init__(self)
        self.register_buffer("state", torch.zeros(4, 8))


class Listed(_Kept):
    def __init__(self):
        self.kept = None
        nn.Module.__init__(self)
        self.kept = [torch.zeros(4, 8)]

    def put(self, value):
        self.kept[0] = value

    def get(self):
        return self.kept[0]


class Queued(Listed):
    def __init__(self):
        super().__init__()
        self.kept = deque(self.kept, maxlen=1)

    def put(self, value):
        self.kept.append(value)


class InDict(Listed):
    def __init__(self):
        super().__init__()
        self.kept = {0: self.kept[0]}


class InTuple(Listed):
    def put(self, value):
        self.kept = (value,)


class InObject(Listed):
    def __init__(self):
        super().__init__()
        self.kept = SimpleNamespace(deep=[self.kept[0]])

    def put(self, value):
        self.kept.deep[0] = value

    def get(self):
        return self.kept.deep[0]


KINDS = [Attribute, Buffer, Listed, Queued, InDict, InTuple, InObject]


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.a, self.kept, self.b = nn.Linear(8, 8), kind(), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(torch.tanh(self.kept(self.a(x))))


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_plain_pytorchs(kind, steps_before):
    torch.manual_seed(0)
    plain, x = Net(kind), torch.randn(4, 8)
    module = copy.deepcopy(plain)

    def step(one):
        one.zero_grad()
        y = one(x)
        y.square().sum().backward()
        grads = [parameter.grad.clone() for parameter in plain_of(one).parameters()]
        return [y.detach().clone(), plain_of(one).kept.get().detach().clone(), *grads]

    def plain_of(one):
        return one if one is plain else module

    for _ in range(steps_before):
        for one in (plain, module):
            step(one)
    left = module.kept.get().detach().clone()
    planned = Rockmate(module, x, "1MiB", cost="flops")
    assert torch.equal(module.kept.get(), left)
    for _ in range(4):
        for theirs, ours in zip(step(plain), step(planned), strict=True):
            assert torch.equal(theirs, ours)


class Decayed(nn.Module):
    """Backward goes through all forwards that no backward has gone through before."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.state = nn.Linear(8, 8), nn.Linear(8, 8), torch.zeros(())

    def forward(self, x):
        x = self.inner(x)
        self.state = 0.5 * self.state + x.mean()
        return self.outer((x + self.state).softmax(-1))


@pytest.mark.parametrize("is_held", [True, False])
def test_a_backward_into_an_earlier_forward_is_refused_with_what_to_do(is_held):
    model = nn.Sequential(nn.Linear(8, 8), Decayed())
    planned = Rockmate(model, torch.randn(4, 8), 2**20, self_test=False)
    model[1].state = torch.zeros(())
    earlier, later = planned(torch.randn(4, 8)), planned(torch.randn(4, 8))
    assert earlier.requires_grad
    earlier = earlier if is_held else None
    with pytest.raises(OpaquePieceError, match=r"into an earlier forward.*state\.detach"):
        later.sum().backward()
    model[1].state = model[1].state.detach()
    planned(torch.randn(4, 8)).sum().backward()  # and the next step is as ever
