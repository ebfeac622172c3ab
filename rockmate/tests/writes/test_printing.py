"""Forwards that print: each step prints what a plain one prints, and planning nothing."""

import copy

import pytest
import torch
from torch import nn

import rockmate
from oracles.training import assert_same_gradients
from rockmate import InfeasibleBudgetError, Rockmate


class Telling(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x):
        print("rows:", len(x))
        return self.down(self.up(x).tanh())


class Root(nn.Module):
    """Prints and looks at a value itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.mean() < 100:
                print("mean:", float(x.detach().mean()))
        return x


NETS = {
    "parts": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), Telling(), Telling()),
    "root": Root,
}


def _trained(model, rows):
    for count in rows:
        torch.manual_seed(count)
        model(torch.randn(count, 8)).square().sum().backward()


@pytest.mark.parametrize("is_least", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_each_step_prints_what_a_plain_one_prints(name, is_least, capsys):
    torch.manual_seed(0)
    model, x = NETS[name](), torch.randn(64, 8)
    twin = copy.deepcopy(model)
    budget = 1 << 20
    if is_least:
        with pytest.raises(InfeasibleBudgetError) as error:
            Rockmate(model, x, 10, cost="flops")
        budget = error.value.minimum_bytes
    planned = Rockmate(model, x, budget, cost="flops")
    assert not capsys.readouterr().out, "planning prints nothing"
    _trained(planned, [64, 64, 64, 32])
    ours = capsys.readouterr().out
    _trained(twin, [64, 64, 64, 32])
    assert ours == capsys.readouterr().out
    assert_same_gradients(model, twin)


def test_planning_blocks_prints_nothing(capsys):
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 64), nn.GELU()) for _ in range(3))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(*one, nn.Linear(64, 8)) for one in layers)

        def forward(self, x):
            for layer in self.layers:
                print("begins")
                x = x + layer(x)
            return x.square().mean()

    model, x = Net(), torch.randn(64, 8)
    rockmate.apply_to_blocks(model, x, 1 << 20, cost="flops", compare=False)
    assert not capsys.readouterr().out
    model(x).backward()
    assert capsys.readouterr().out == "begins\n" * 3
