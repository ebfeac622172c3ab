"""A backward, and what is computed again for it, reads what its own forward saw."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

from oracles.training import assert_same_gradients
from rockmate import InfeasibleBudgetError, Rockmate
from runs.planned import wrap


class Normed(nn.Module):
    """Power iterations write to buffers, which the same forward reads again."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        layers = [nn.Sequential(norm(nn.Linear(32, 32)), nn.Tanh()) for _ in range(3)]
        self.body = nn.Sequential(nn.Linear(32, 32), *layers)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.body(x)
        return made


class Codebook(nn.Module):
    """Codes that follow what is chosen, by a moving average, and are read after that."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 16), nn.Linear(16, 32)
        self.register_buffer("codes", torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        choice = torch.softmax(h @ self.codes.t(), dim=1)
        with torch.no_grad():
            weights = choice.t() @ h
            self.codes.mul_(0.9).add_(weights / choice.sum(0)[:, None], alpha=0.1)
        near = torch.softmax(h @ self.codes.t().clone(), dim=1) @ self.codes.clone()
        made: Tensor = torch.tanh(self.outer(h + near))
        return made


class Centred(nn.Module):
    """A running mean, written through a view and by `out=`, and read in the same forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("mean", torch.zeros(2, 32))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        with torch.no_grad():
            row = self.mean[0]
            row.lerp_(h.mean(0), 0.1)
            torch.mul(row, 0.5, out=self.mean[1])
        h = torch.tanh(h - self.mean[0].clone()) * torch.sigmoid(self.mean[1].clone())
        made: Tensor = torch.tanh(self.outer(h))
        return made


class Counted(nn.Module):
    """A step count that scales what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        scale = torch.exp(-self.steps / 10)
        made: Tensor = torch.tanh(self.outer(torch.tanh(self.inner(x) * scale) * scale))
        return made


NETS: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": lambda: Normed(spectral_norm),
    "its older form": lambda: Normed(old_spectral_norm),
    "codebook": Codebook,
    "running mean": Centred,
    "count": Counted,
}
Losses = Callable[[nn.Module, Tensor, Tensor], None]


def _joint(module: nn.Module, x: Tensor, y: Tensor) -> None:
    (module(x).square().mean() + 2 * module(y).square().mean()).backward()


def _first_first(module: nn.Module, x: Tensor, y: Tensor) -> None:
    one, two = module(x).square().mean(), module(y).square().mean()
    one.backward()
    two.backward()


def _last_first(module: nn.Module, x: Tensor, y: Tensor) -> None:
    one, two = module(x).square().mean(), module(y).square().mean()
    two.backward()
    one.backward()


def _without_gradient_between(module: nn.Module, x: Tensor, y: Tensor) -> None:
    loss = module(x).square().mean()
    with torch.no_grad():
        module(y)
    loss.backward()


def _buffers_replaced_between(module: nn.Module, x: Tensor, y: Tensor) -> None:
    loss = module(x).square().mean()
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer * 0.5)
    loss.backward()


ORDERS: dict[str, Losses] = {
    "joint": _joint,
    "first first": _first_first,
    "last first": _last_first,
    "no_grad between": _without_gradient_between,
    "buffers replaced between": _buffers_replaced_between,
}


SOON = ("joint", "last first", "no_grad between")


def _wrapped(model: nn.Module, x: Tensor, budget: float) -> Rockmate:
    try:
        return wrap(model, x, budget)
    except InfeasibleBudgetError as error:
        return wrap(model, x, error.minimum_bytes)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("budget", [pytest.param(1.0, marks=pytest.mark.nightly), 0.6, 0.01])
@pytest.mark.parametrize(
    "order", [o if o in SOON else pytest.param(o, marks=pytest.mark.nightly) for o in ORDERS]
)
@pytest.mark.parametrize("net", NETS)
def test_other_forwards_may_come_before_a_backward(net: str, order: str, budget: float) -> None:
    torch.manual_seed(0)
    model = NETS[net]()
    twin = copy.deepcopy(model)
    x, y = torch.randn(64, 32), torch.randn(64, 32)
    wrapped = _wrapped(model, x, budget)
    for _ in range(2):
        for module in (wrapped, twin):
            module.zero_grad()
            ORDERS[order](module, x, y)
        assert_same_gradients(model, twin)
        pairs = zip(model.buffers(), twin.buffers(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_most_of_these_compute_again() -> None:
    """The test above would pass without recomputation."""
    x: Any = torch.randn(64, 32)
    torch.manual_seed(0)
    overheads = [_wrapped(make(), x, 0.01).plan.overhead for make in NETS.values()]
    assert sum(overhead > 0 for overhead in overheads) >= 4
