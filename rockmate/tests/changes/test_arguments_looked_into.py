"""Objects among the arguments of a call: what they hold may change between calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rockmate import Rockmate


class Holder:
    """Holds something besides values."""

    def __init__(self) -> None:
        self.opaque, self.scale = object(), 2.0

    def get(self) -> float:
        return self.scale


class Equal(Holder):
    """Says that it is equal to all others."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


@dataclass
class Options:
    scale: float = 2.0
    more: dict[str, float] = field(default_factory=lambda: {"scale": 2.0})


Of = Callable[[Any], float]
CASES: dict[str, tuple[Callable[[], Any], Of, Callable[[Any, float], object]]] = {
    "an object": (Holder, lambda o: o.scale, lambda o, v: setattr(o, "scale", v)),
    "one that equals all": (Equal, lambda o: o.scale, lambda o, v: setattr(o, "scale", v)),
    "slots": (Slots, lambda o: o.scale, lambda o, v: setattr(o, "scale", v)),
    "a dataclass": (Options, lambda o: o.scale, lambda o, v: setattr(o, "scale", v)),
    "a dict in it": (Options, lambda o: o.more["scale"], lambda o, v: o.more.update(scale=v)),
    "a namespace in another": (
        lambda: SimpleNamespace(inner=SimpleNamespace(scale=2.0)),
        lambda o: o.inner.scale,
        lambda o, v: setattr(o.inner, "scale", v),
    ),
    "an object in a dict": (
        lambda: {"key": Holder()},
        lambda o: o["key"].scale,
        lambda o, v: setattr(o["key"], "scale", v),
    ),
    "a method": (lambda: Holder().get, lambda o: o(), lambda o, v: setattr(o.__self__, "scale", v)),
    "a class": (
        lambda: type("K", (), {"__module__": __name__, "scale": 2.0}),
        lambda o: o.scale,
        lambda o, v: setattr(o, "scale", v),
    ),
    "an array": (lambda: np.full(3, 2.0), lambda o: float(o[1]), lambda o, v: o.fill(v)),
    "a set": (lambda: {2.0}, lambda o: max(o), lambda o, v: (o.clear(), o.add(v))),
}


class Net(nn.Module):
    def __init__(self, read: Of) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.read = read

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        return self.layers(x) * self.read(given)


def _step(model: nn.Module, x: torch.Tensor, given: Any) -> list[torch.Tensor]:
    model.zero_grad()
    y = model(x, given)
    y.square().sum().backward()
    return [y, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", CASES)
def test_what_it_holds_may_change(kind: str) -> None:
    make, read, change = CASES[kind]
    given, x = make(), torch.randn(4, 8)
    net = Net(read)
    twin, planned = copy.deepcopy(net), Rockmate(net, (x, given), "1MiB", cost="flops")
    for value in (2.0, 2.0, 2.0, 3.0, 2.0):  # the first are looked at once more
        change(given, value)
        assert all(map(torch.equal, _step(planned, x, given), _step(twin, x, given)))
    assert len(planned.plans) == 2


class Silent(Holder):
    """Cannot be compared, hashed or shown."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("nobody asks for this")

    __eq__ = __hash__ = __repr__ = __bool__ = __len__ = _refuse  # type: ignore[assignment]


def test_an_object_that_cannot_be_compared_or_shown() -> None:
    net, x, given = Net(lambda o: o.scale), torch.randn(4, 8), Silent()
    twin, planned = copy.deepcopy(net), Rockmate(net, (x, given), "1MiB", cost="flops")
    for value in (2.0, 2.0, 3.0):
        given.scale = value
        assert all(map(torch.equal, _step(planned, x, given), _step(twin, x, given)))
    assert planned.plans[-1].why


@pytest.mark.parametrize("kind", ["a dataclass", "an array", "a set"])
def test_another_one_that_holds_the_same_needs_no_plan(kind: str) -> None:
    make, read, _ = CASES[kind]
    x, net = torch.randn(4, 8), Net(read)
    twin, planned = copy.deepcopy(net), Rockmate(net, (x, make()), "1MiB", cost="flops")
    for _ in range(3):
        assert all(map(torch.equal, _step(planned, x, make()), _step(twin, x, make())))
    assert len(planned.plans) == 1
