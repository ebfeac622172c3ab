"""What a forward sets at its first call and finds set from then on is set as plain PyTorch does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from runs.planned import wrap


class Config:
    def __init__(self) -> None:
        self.kind: str | None = None
        self.layers = 4


class Net(nn.Module):
    """Works out at its first call how its loss is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.BatchNorm1d(16)) for _ in range(4))
        )
        self.kind: str | None = None
        self._is_built = False
        self.config, self.known = Config(), dict[str, int]()

    def state(self) -> list[Any]:
        return [self.kind, self._is_built, vars(self.config), self.known]


class OfItself(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.kind is None:
            self.kind = "mean" if x.dtype is torch.float32 else "sum"
        y = self.body(x).square()
        return y.mean() if self.kind == "mean" else y.sum()


class OfItsConfiguration(Net):
    """As models of Hugging Face do with `config.problem_type`."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x).square()
        if self.config.kind is None:
            self.config.kind = "mean"
        return y.mean() if self.config.kind == "mean" else y.sum()


class OfADict(Net):
    def forward(self, x: Tensor) -> Tensor:
        if "rows" not in self.known:
            self.known["rows"] = 3
        return self.body(x).square().mean() * self.known["rows"]


class OfItsInput(Net):
    """As Accelerate's hooks note where an input lies: an equal object at every call."""

    def forward(self, x: Tensor) -> Tensor:
        self.config.kind = x.device  # type: ignore[assignment]
        self.config.layers, self.known["size"] = 1000 * x.dim(), x.numel()
        y = self.body(x).square()
        return (y.sum() if self.config.kind == "sum" else y.mean()).to(x.device)


@pytest.mark.parametrize("make", [OfItself, OfItsConfiguration, OfADict, OfItsInput])
@pytest.mark.parametrize("budget", [0.6, 1.0])
def test_a_value_of_the_first_call(make: type[Net], budget: float) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(256, 16)
    twin, before = copy.deepcopy(model), copy.deepcopy(model.state())
    rk = wrap(model, x, budget)
    assert model.state() == before
    assert not rk.plan.opaque
    for _ in range(3):
        for net in (rk, twin):
            net.zero_grad()
            net(x).backward()
        assert model.state() == twin.state() != before
        assert_same_gradients(model, twin)
    assert len(rk.plans) == 1
    for net in (model, twin):  # another value than the one it has found
        net.kind = net.config.kind = "sum"
        net.known["rows"] = 5
        net.zero_grad()
    rk(x).backward()
    twin(x).backward()
    assert_same_gradients(model, twin)


class Doubled(Net):
    """Computes something else at its first call."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x).square().mean()
        if self.kind is None:
            self.kind = "later"
            y = y * 2
        return y


class Filled(Net):
    """Takes a scale from the data of its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if not self.ready:
            self.scale.copy_(y.detach().std())
            self.ready = True
        return (y / self.scale).mean()


class Counting(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.config.layers += 1
        return self.body(x).square().mean() * self.config.layers


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("make", [Doubled, Filled, Counting])
def test_a_first_call_that_is_another_one(make: type[Net]) -> None:
    """What differs runs whole, and does as plain."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(64, 16)
    twin = copy.deepcopy(model)
    rk = wrap(model, x, 1.0)
    for step in range(3):
        torch.manual_seed(step)
        data = torch.randn(64, 16)
        for net in (rk, twin):
            net.zero_grad()
            net(data).backward()
        assert model.state() == twin.state()
        assert all(map(torch.equal, model.buffers(), twin.buffers()))
        assert_same_gradients(model, twin)
