"""What recorded Python reads of a submodule that runs whole may change between steps."""

import copy
import random

import pytest
import torch
from torch import nn

from rockmate import Rockmate


class Whole(nn.Module):
    """Draws from Python's random numbers, so that it runs whole."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale, self.config = nn.Linear(8, 8), 1.0, {"t": 1.0}
        self.kept, self.unread = [torch.ones(8)], 0

    def forward(self, x):
        return self.linear(x) * random.random()


class Net(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.a, self.part, self.read = nn.Linear(8, 8), Whole(), read

    def forward(self, x):
        return torch.relu(self.part(self.a(x))) * self.read(self.part)


def _replace(part):
    part.kept[0] = part.kept[0] + 1


CASES = {
    "number": (lambda part: part.scale, lambda part: setattr(part, "scale", part.scale + 1)),
    "config": (lambda part: part.config["t"], lambda part: part.config.update(t=3.0)),
    "mode": (lambda part: 2.0 if part.training else 3.0, lambda part: part.eval()),
    "tensor": (lambda part: part.kept[0], _replace),
}


def _step(module, net, x, seed):
    random.seed(seed)
    net.zero_grad()
    y = module(x)
    y.square().sum().backward()
    return [y.detach().clone(), *(parameter.grad.clone() for parameter in net.parameters())]


@pytest.mark.parametrize("case", CASES)
def test_it_is_looked_at(case):
    read, change = CASES[case]
    torch.manual_seed(0)
    net, x = Net(read), torch.randn(4, 8)
    plain = copy.deepcopy(net)
    planned = Rockmate(net, x, "1MiB", cost="flops")
    assert planned.plan.opaque == ("part",)
    for seed in range(4):
        for a, b in zip(_step(planned, net, x, seed), _step(plain, plain, x, seed), strict=True):
            assert torch.equal(a, b)
        change(net.part)
        change(plain.part)


def test_what_only_the_part_itself_may_read_needs_no_plan():
    torch.manual_seed(0)
    net, x = Net(CASES["number"][0]), torch.randn(4, 8)
    planned = Rockmate(net, x, "1MiB", cost="flops")
    net.part.unread = 1
    planned(x)
    assert len(planned.plans) == 1
