"""Whether one object is another: a recording has copies, of which none is what a variable holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rockmate import Rockmate

Asks = Callable[[Any, Tensor], bool]


class Settings:
    scale = 2.0


class Outer(nn.Module):
    def __init__(self, asks: Asks) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.kept, self.settings, self.asks = torch.ones(4), Settings(), asks

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y * (2 if self.asks(self, x) else 3)


held: Any = None  # what a model has, too
given = torch.randn(6, 8)


class Around:
    held: Any = None
    others: Any = ()


GLOBALS: dict[str, tuple[str, Asks]] = {
    "tensor": ("kept", lambda own, _: own.kept is held),
    "module": ("second", lambda own, _: own.second is held),
    "equal": ("second", lambda own, _: own.second == held),
    "object": ("settings", lambda own, _: own.settings is held),
    "weight": ("second.weight", lambda own, _: own.second.weight is held),
}


def _trains_as_plain(model: Outer, sample: Tensor) -> None:
    """Compare three steps with those of the model itself, whose objects are outside."""
    state = copy.deepcopy(model.state_dict())
    planned = Rockmate(model, (sample,), 1.0, cost="flops", cache=False, progress=False)
    found = []
    for module in (planned, model):
        model.load_state_dict(state)
        for other in (sample, sample.clone(), sample):
            model.zero_grad()
            result = module(other)
            result.square().sum().backward()
            found.append([result.detach(), *(p.grad.clone() for p in model.parameters())])
    for ours, plain in zip(found[:3], found[3:], strict=True):
        assert all(map(torch.equal, ours, plain))


@pytest.mark.parametrize("name", GLOBALS)
def test_an_own_object_that_a_variable_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asks = GLOBALS[name]
    model = Outer(asks)
    own = model
    for part in path.split("."):
        own = getattr(own, part)
    monkeypatch.setitem(globals(), "held", own)
    _trains_as_plain(model, torch.randn(6, 8))


def test_an_own_object_of_an_object_outside() -> None:
    around = Around()
    model = Outer(lambda own, _: own.second is around.held and own.first in around.others)
    around.held, around.others = model.second, [model.first]
    _trains_as_plain(model, torch.randn(6, 8))


@pytest.mark.parametrize("kind", [list, tuple])
def test_an_own_module_in_a_list(kind: Callable[..., Any]) -> None:
    parts: Any = ()
    model = Outer(lambda own, _: own.first in parts and own.second not in parts)
    parts = kind([model.first])
    _trains_as_plain(model, torch.randn(6, 8))


def test_an_argument_that_a_variable_holds() -> None:
    _trains_as_plain(Outer(lambda _, x: x is given), given)


def test_an_argument_in_a_list() -> None:
    known = [given]
    _trains_as_plain(Outer(lambda _, x: any(x is one for one in known)), given)


def test_what_compares_with_none_is_planned() -> None:
    parts: Any = ()
    model = Outer(lambda _, x: x is not None and len(parts) == 1)
    parts = [model.first]
    planned = Rockmate(model, (given,), 1.0, cost="flops", cache=False, progress=False)
    assert not planned.plan.opaque


class Remembering(nn.Module):
    """Reads what it has kept by way of a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        before = getattr(held, "before", None)
        self.before = y.detach()
        return y if before is None else y + before.mean()


def test_what_it_keeps_is_read_by_way_of_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Remembering()
    monkeypatch.setitem(globals(), "held", model)
    planned = Rockmate(model, (given,), 1.0, cost="flops", cache=False, progress=False)
    found = []
    for module in (planned, model):
        vars(model).pop("before", None)
        found.append([module(given).detach() for _ in range(3)])
    assert all(map(torch.equal, *found))
    assert not torch.equal(found[0][0], found[0][1])
