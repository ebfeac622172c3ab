"""What plain PyTorch reads again in a backward has to be there as it was at the forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from rockmate import Rockmate, UnsupportedModuleError

SCALES = {"outer": 2.0}
LAST = 2.0


class Checkpointed(nn.Module):
    """Its dropout, a number of its own and a variable outside are read by a checkpoint."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8)
        self.scale, self.reentrant = 2.0, reentrant

    def inner(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.first(x) * self.scale * SCALES["outer"] * LAST))

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Scaled(torch.autograd.Function):
    """Its backward reads a number of the module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: WithFunction) -> Tensor:
        ctx.module = module
        return x * module.scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.module.scale, None


class WithFunction(nn.Module):
    """A module that its Function holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.scale = nn.Linear(8, 8), nn.Dropout(0.2), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(self.drop(self.first(x)), self)


MODELS = {
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(reentrant=True),
    "Function": WithFunction,
}
CHANGES: dict[str, Callable[[Any], object]] = {
    "probability": lambda model: setattr(model.drop, "p", 0.5),
    "mode": lambda model: model.eval(),
    "number": lambda model: setattr(model, "scale", 3.0),
    "variable": lambda _: SCALES.update(outer=3.0),
}


def _step(run: nn.Module, model: nn.Module, change: Callable[[Any], object]) -> list[Tensor]:
    """Return the gradients of a step with a change between its passes."""
    torch.manual_seed(1)
    y = run(torch.linspace(-1, 1, 32).reshape(4, 8))
    change(model)
    y.square().mean().backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_what_nothing_in_the_backward_reads_may_change(name: str) -> None:
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    rk = Rockmate(model, torch.randn(4, 8), 2**20)
    for _ in range(3):
        found = _step(rk, model, lambda m: setattr(m, "epoch", getattr(m, "epoch", 0) + 1))
        assert all(map(torch.equal, found, _step(twin, twin, id)))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("checkpoint", change) for change in CHANGES),
        ("reentrant checkpoint", "number"),
        ("Function", "number"),
    ],
)
def test_a_change_of_what_a_backward_reads_is_refused(
    name: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCALES, "outer", 2.0)
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    rk = Rockmate(model, torch.randn(4, 8), 2**20)
    with pytest.raises(UnsupportedModuleError, match="has changed since the forward"):
        _step(rk, model, CHANGES[change])
    model.zero_grad()
    model.drop.p, model.scale = twin.drop.p, twin.scale
    model.train()
    SCALES["outer"] = 2.0
    assert all(map(torch.equal, _step(rk, model, id), _step(twin, twin, id)))


def test_a_number_counts_as_in_other_guards() -> None:
    """A zero of another sign is another number; the same one may be set again."""
    model = Checkpointed(reentrant=False)
    model.scale = 0.0
    rk = Rockmate(model, torch.randn(4, 8), 2**20)
    _step(rk, model, lambda m: setattr(m, "scale", float("0.0")))
    with pytest.raises(UnsupportedModuleError, match="'scale' of module"):
        _step(rk, model, lambda m: setattr(m, "scale", -0.0))


def test_a_refusal_names_the_variable_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Checkpointed(reentrant=False)
    rk = Rockmate(model, torch.randn(4, 8), 2**20)
    change = partial(monkeypatch.setitem, globals(), "LAST", 3.0)
    with pytest.raises(UnsupportedModuleError, match="reads global 'LAST'") as refused:
        _step(rk, model, lambda _: change())
    assert "SCALES" not in str(refused.value)


class Setting(nn.Module):
    """Its checkpointed part sets a buffer, a weight and a counter."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.part = nn.Sequential(
            prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.3), nn.BatchNorm1d(8), Counted()
        )
        self.last, self.checkpoints = nn.Linear(8, 4), checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.part, x, use_reentrant=False) if self.checkpoints else self.part(x)
        return self.last(x)  # type: ignore[no-any-return]


class Counted(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_what_a_checkpoint_sets_is_set_once_a_step() -> None:
    """As without the checkpoint, also where another forward runs before the backward."""
    found = []
    for is_planned in (True, False):
        torch.manual_seed(0)
        model, x = Setting(checkpoints=is_planned), torch.randn(16, 8)
        net = Rockmate(model, (x,), 2**20, cost="flops") if is_planned else model
        for _ in range(2):
            y = net(x)
            with torch.no_grad():
                other = net(x + 1)
            y.square().sum().backward()
        pruned: Any = model.part[0]
        counted: Any = model.part[2]
        assert counted.calls == 4
        tensors = [y.detach(), other, pruned.weight.detach(), *model.buffers()]
        found.append([*tensors, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))
