"""Buffers that a forward writes and returns: the module's own objects, as in plain PyTorch."""

import copy

import pytest
import torch
from torch import nn

from oracles.training import assert_same_gradients
from rockmate import Rockmate


class Mean(nn.Module):
    """Follows the mean of what it computes."""

    def __init__(self, returned):
        super().__init__()
        self.up, self.down, self.returned = nn.Linear(8, 32), nn.Linear(32, 8), returned
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        z = self.down(torch.tanh(self.up(x)))
        before = self.mean
        self.mean.lerp_(z.detach().mean(0), 0.1)
        self.calls += 1
        return self.returned(self, z, before)


RETURNED = {
    "mean": lambda net, z, _: (z, net.mean),
    "number": lambda net, z, _: (z, net.calls),
    "object from before": lambda _, z, before: (z, before),
    "read, too": lambda net, z, _: (z * net.mean, net.mean),
    "in lists": lambda net, z, _: (z, [net.mean, net.mean, net.calls]),
    "part": lambda net, z, _: (z, net.mean[2:]),
}


def _tensors(result):
    return torch.utils._pytree.tree_leaves(result)


@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("name", RETURNED)
def test_a_returned_buffer_is_the_modules_and_holds_what_was_written(name, is_copy):
    torch.manual_seed(0)
    model, x = Mean(RETURNED[name]), torch.randn(32, 8)
    twin = copy.deepcopy(model)
    planned = Rockmate(model, x, 0.9, cost="flops")
    if is_copy:
        planned = copy.deepcopy(planned)
    for step in range(3):
        ours, theirs = _tensors(planned(x * step)), _tensors(twin(x * step))
        assert all(map(torch.equal, ours, theirs))
        own, other = [*planned.buffers()], [*twin.buffers()]
        assert [[a is b for b in own] for a in ours] == [[a is b for b in other] for a in theirs]
        for results in (ours, theirs):
            results[0].square().sum().backward()
    assert_same_gradients(planned, twin)
    assert all(map(torch.equal, planned.buffers(), twin.buffers()))
