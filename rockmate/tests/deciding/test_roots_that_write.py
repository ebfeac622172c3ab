"""Roots that decide by values, and write to what their blocks read: the bits of plain PyTorch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rockmate import InfeasibleBudgetError, Rockmate

WIDTH, ROWS = 32, 128


class Layer(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(4 * WIDTH))
        self.register_buffer("unread", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x) * self.scale)).tanh()


class Root(nn.Module):
    """Layers left out by Python's random numbers; `write` is called for some, before or after."""

    def __init__(self, write: Callable[[Layer], object], when: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.last, self.write, self.when = Layer(), write, when

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "before":
            self.write(self.last)
        for layer in self.layers:
            if random.random() >= 0.2:
                x = layer(x)
        x = self.last(x)
        if self.when == "after":
            self.write(self.last)
        elif self.when == "after all":
            for layer in (*self.layers, self.last):
                assert isinstance(layer, Layer)
                self.write(layer)
        elif self.when == "between":
            self.write(self.last)
            x = self.last(x)
        return x.square().mean()


def weight_by_data(layer: Layer) -> None:
    layer.up.weight.data.mul_(0.9)


def bias_by_data(layer: Layer) -> None:
    layer.up.bias.data.add_(0.1)


def bias_without_gradients(layer: Layer) -> None:
    with torch.no_grad():
        layer.up.bias.lerp_(layer.down.weight.mean(1).repeat(4), 0.1)


def buffer_by_data(layer: Layer) -> None:
    layer.scale.data.mul_(0.9)


def unread_buffer(layer: Layer) -> None:
    layer.get_buffer("unread").add_(1)


CASES = [
    (weight_by_data, "before"),
    (weight_by_data, "between"),
    (bias_by_data, "after"),
    (bias_without_gradients, "after"),
    (buffer_by_data, "between"),
    (unread_buffer, "after"),
]


def _assert_same_steps(model: Root, planned: Rockmate, twin: Root) -> None:
    for step in range(3):
        found = []
        for net, state in ((model, model), (planned, twin)):
            random.seed(step)
            torch.manual_seed(step)
            loss = net(torch.randn(ROWS, WIDTH))
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in state.parameters())])
            found[-1] += [t.clone() for t in state.state_dict().values()]
            for parameter in state.parameters():
                parameter.grad = None
        for theirs, ours in zip(*found, strict=True):
            assert theirs is ours or torch.equal(theirs, ours)


@pytest.mark.parametrize(("write", "when"), CASES)
def test_a_block_that_the_root_writes_to(write: Callable[[Layer], object], when: str) -> None:
    random.seed(0)
    torch.manual_seed(0)
    model = Root(write, when)
    twin = copy.deepcopy(model)
    planned = Rockmate(twin, torch.randn(ROWS, WIDTH), 0.8, self_test=False)
    assert planned.plan.opaque == ("",)
    assert planned.plan.overhead_percent > 0  # others run again
    _assert_same_steps(model, planned, twin)


def test_what_is_written_is_named_where_no_budget_is_left() -> None:
    model = Root(bias_by_data, "after all")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(model, torch.randn(ROWS, WIDTH), 0.5)
    assert any("up.bias' is written in the forward of the root" in n for n in error.value.__notes__)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


class WithState(nn.Module):
    """It goes on from what earlier steps have left, history included, and decides by values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Layer() for _ in range(3))
        self.state, self.past = torch.zeros(()), [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sin()
        self.state = 0.5 * self.state + x.mean()
        self.past = [self.past[-1] + x.std()]
        if x.mean() > 100:
            x = x * 2
        x = x + self.state + self.past[0]
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_planning_does_not_run_back_into_earlier_steps() -> None:
    """A call of another size is planned while a step before it waits for its backward."""
    torch.manual_seed(0)
    model = WithState()
    twin = copy.deepcopy(model)
    with pytest.raises(InfeasibleBudgetError) as refused:
        Rockmate(model, torch.randn(ROWS, WIDTH), 100, cost="flops")
    budget = refused.value.minimum_bytes
    planned = Rockmate(model, torch.randn(ROWS, WIDTH), budget, cost="flops", self_test=False)
    waiting = []
    for module, own in ((planned, model), (twin, twin)):
        torch.manual_seed(1)
        waiting.append(module(torch.randn(ROWS, WIDTH)))
        module(torch.randn(ROWS // 4, WIDTH))
        assert all(parameter.grad is None for parameter in own.parameters())
        waiting[-1].backward()
    assert torch.equal(*waiting)
    assert_same_gradients(model, twin)
    assert torch.equal(model.state, twin.state)
    assert torch.equal(model.past[0], twin.past[0])
