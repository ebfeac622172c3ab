"""Weights that several stages use, some of them several times: autograd's sums, in its order."""

import copy
import itertools

import pytest
import torch
from torch import nn

from oracles.checkpointables import assert_trains_like, at_fraction, one_millisecond, peak_of
from rotor import Checkpointable
from zoo.chains import Squashed

CPU = torch.device("cpu")


class Twice(Squashed):
    def forward(self, x):
        return self.linear(self.linear(x).sin()).tanh()


class BothWays(Squashed):
    def forward(self, x):
        return (x @ self.linear.weight + x @ self.linear.weight.t()).tanh()


class Cut(Squashed):
    def forward(self, x):
        return self.linear(x.detach()).tanh()


def chain_of(kinds, width=33):
    shared = nn.Linear(width, width)
    return nn.Sequential(*(kind(shared) for kind in kinds))


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("kinds", list(itertools.product([Squashed, Twice, BothWays], repeat=3)))
def test_gradients_are_added_one_by_one(kinds, fraction):
    twin = chain_of(kinds)
    chk = Checkpointable(copy.deepcopy(twin), torch.randn(17, 33), timer=one_millisecond)
    at_fraction(chk, fraction)
    assert_trains_like(chk, twin, [torch.randn(17, 33) for _ in range(2)])


@pytest.mark.parametrize(
    "kinds", [(Twice, Cut, Squashed), (BothWays, Twice, Cut), (Cut, Twice, Squashed)]
)
def test_nothing_is_lost_where_the_chain_is_cut(kinds):
    """What waits for a stage that is never reached must have been handed over before."""
    twin = chain_of(kinds)
    chk = Checkpointable(copy.deepcopy(twin), torch.randn(17, 33), timer=one_millisecond)
    at_fraction(chk, 0.0)
    x = torch.randn(17, 33)
    for module in (chk, twin):
        module(x).square().sum().backward()
    for mine, theirs in zip(chk.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_frozen_beginning_is_never_reached():
    frozen = nn.Linear(33, 33).requires_grad_(False)
    shared = nn.Linear(33, 33)
    twin = nn.Sequential(
        Squashed(frozen), Twice(frozen), Squashed(shared), Twice(shared), Squashed(shared)
    )
    chk = Checkpointable(copy.deepcopy(twin), torch.randn(17, 33), timer=one_millisecond)
    at_fraction(chk, 0.0)
    x = torch.randn(17, 33)
    for module in (chk, twin):
        module(x).square().sum().backward()
    assert torch.equal(chk[3].linear.weight.grad, twin[3].linear.weight.grad)
    assert chk[0].linear.weight.grad is None


def test_hooks_of_a_shared_weight_see_the_whole_gradient_once():
    twin = chain_of((Twice, Squashed, BothWays))
    chk = Checkpointable(copy.deepcopy(twin), torch.randn(17, 33), timer=one_millisecond)
    at_fraction(chk, 0.0)
    x, seen = torch.randn(17, 33), []
    for module in (chk, twin):
        weight = module[0].linear.weight
        weight.register_hook(lambda grad: seen.append(grad.clone()))
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        module(x).square().sum().backward()
    assert len(seen) == 4
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])


def test_sums_that_wait_are_counted():
    chk = Checkpointable(
        chain_of((Twice, Squashed, Twice, BothWays), 128),
        torch.randn(64, 128),
        timer=one_millisecond,
    )
    at_fraction(chk, 0.0)
    x = torch.randn(64, 128)

    def step():
        chk(x).sum().backward()

    step()
    assert peak_of(step, CPU) <= chk.mem_limit
