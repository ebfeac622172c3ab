"""Autocast casts a weight once a region: several forwards there add up in the lower precision."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rockmate import Rockmate, UnsupportedModuleError


class Tied(nn.Module):
    """Uses one weight as a table, where autocast does not cast it, and as a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(x.argmax(-1)) + x)
        return out


class Twice(nn.Module):
    """Uses one weight twice; as a part that runs whole, if it decides."""

    def __init__(self, *, decides: bool = False) -> None:
        super().__init__()
        self.inner, self.last, self.decides = nn.Linear(8, 8), nn.Linear(8, 8), decides

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(torch.tanh(self.inner(x))))
        if self.decides and x.mean() > 100:
            x = x * 2
        out: Tensor = self.last(x)
        return out


class Calls(nn.Module):
    """Calls parts that run whole, and uses the weight of one of them outside of it."""

    def __init__(self, *, outside: bool) -> None:
        super().__init__()
        self.part, self.outside = Twice(decides=True), outside

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(x)
        return torch.tanh(self.part.inner(x)) if self.outside else self.part(x)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8))


def siamese(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean() + 2 * model(x + 1).float().tanh().mean()


def three(model: nn.Module, x: Tensor) -> Tensor:
    return siamese(model, x) + model(x - 1).float().sum()


def nested(model: nn.Module, x: Tensor) -> Tensor:
    return model(model(x).float().tanh()).float().square().sum()


def one(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().sum()


def trained_alike(model: nn.Module, loss: Callable[..., Tensor], *, cache: bool = True) -> None:
    budget = 0.9 if isinstance(model, nn.Sequential) else 2**20
    plain = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(64, 8), budget)
    for _ in range(5):
        x = torch.randn(64, 8)
        for each in (planned, plain):
            each.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                total = loss(each, x)
            total.backward()
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("loss", [siamese, three, nested])
@pytest.mark.parametrize("make", [net, Tied])
def test_forwards_in_one_region(make: Callable[[], nn.Module], loss: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    trained_alike(make(), loss)


def test_backwards_by_themselves_and_twice() -> None:
    torch.manual_seed(0)
    model = net()
    plain = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(64, 8), 0.9)
    x = torch.randn(64, 8)
    for each in (planned, plain):
        with torch.autocast("cpu", torch.bfloat16):
            losses = [each(x + n).float().square().mean() for n in range(3)]
        losses[2].backward(retain_graph=True)
        (losses[0] + losses[1]).backward(retain_graph=True)
        (losses[0] + losses[2]).backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("decides", [False])  # a root that decides is plain PyTorch
def test_weights_of_several_uses_are_refused_before_anything_is_added(decides: bool) -> None:
    torch.manual_seed(0)
    model = Twice(decides=decides)
    planned = Rockmate(model, torch.randn(64, 8), 2**20)
    with torch.autocast("cpu", torch.bfloat16):
        total = siamese(planned, torch.randn(64, 8))
    with pytest.raises(UnsupportedModuleError, match=r"casts 'inner.bias' once a region"):
        total.backward()
    assert all(p.grad is None for p in model.parameters())
    trained_alike(Twice(decides=decides), one)
    trained_alike(Twice(decides=decides), siamese, cache=False)


@pytest.mark.parametrize("outside", [False, True])
def test_a_weight_that_several_whole_parts_cast(outside: bool) -> None:
    torch.manual_seed(0)
    trained_alike(Calls(outside=outside), one)


@pytest.mark.parametrize("cache", [True, False])
def test_a_weight_that_changes_within_a_region(cache: bool) -> None:
    """Plain PyTorch goes on with the old cast: refused before anything runs; exact without it."""
    torch.manual_seed(0)
    model, x = net(), torch.randn(64, 8)
    theirs = copy.deepcopy(model)
    planned = Rockmate(model, x, 2**20)
    found = []
    for call, trained in ((theirs, theirs), (planned, model)):
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            one(call, x).backward()
            optimizer.step()
            if cache and call is planned:
                with pytest.raises(UnsupportedModuleError, match="leave the autocast region"):
                    one(call, x)
                optimizer.zero_grad()
            else:
                one(call, x).backward()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            one(call, x).backward()
        found.append([p.grad for p in trained.parameters()])
    assert cache or all(map(torch.equal, *found))
