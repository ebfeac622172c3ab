"""A model's own parts, to which its forward gets from outside: by globals, closures, parents.

A recording runs a copy; while it runs, what lies outside leads to the copy too.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rockmate import Rockmate, apply_to_blocks, estimate, largest_batch

Forward = Callable[[Any, Tensor], Tensor]

PLACES: dict[str, Any] = {}
BY_MODULE: dict[nn.Module, float] = {}
CHOSEN: set[nn.Module] = set()
RECENT: deque[nn.Module] = deque()
WEAKLY: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()
COUNTED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
NAMED: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


class Registry:
    layer: nn.Module


class Part:
    count = 0


class Known(nn.Module):
    """Is known in many places outside; `run` decides by which of them its forward gets to parts."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.run, self.part = run, Part()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.run(self, x)))
        return result

    def doubled(self, x: Tensor) -> Tensor:
        result: Tensor = self.first(x) * 2
        return result

    def be_known(self) -> None:
        first, second = self.first, self.second
        PLACES.update(
            model=self, layer=first, weight=first.weight, both=(first, second), method=self.doubled
        )
        PLACES.update(
            ref=weakref.ref(first),
            sum=first.weight.sum,
            partial=functools.partial(torch.add, first.bias),
            closure=lambda x: first(x),
        )
        for table in (BY_MODULE, WEAKLY):
            table.clear()
            table.update({first: 2.0, second: 3.0})
        CHOSEN.clear()
        CHOSEN.add(second)
        RECENT.clear()
        RECENT.append(second)
        COUNTED.clear()
        NAMED.clear()
        NAMED["part"] = self.part
        Registry.layer = first


def _each(model: Known, x: Tensor) -> Tensor:
    for layer, factor in BY_MODULE.items():
        x = layer(x) * factor
    return x


def _set_by_another_way(model: Known, x: Tensor) -> Tensor:
    PLACES["model"].between = torch.sigmoid(model.first(x))
    return model.second(model.between) * 2  # type: ignore[arg-type]


def _every(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = torch.tanh(layer(x))
    return x


READ: dict[str, Forward] = {
    "model": lambda m, x: PLACES["model"].first(x),
    "layer": lambda m, x: PLACES["layer"](x),
    "weight": lambda m, x: x @ PLACES["weight"],
    "tuple": lambda m, x: _every(PLACES["both"], x),
    "method": lambda m, x: PLACES["method"](x),
    "reference": lambda m, x: PLACES["ref"]()(x),
    "method of a tensor": lambda m, x: m.second(x) * PLACES["sum"](),
    "partial": lambda m, x: PLACES["partial"](m.second(x)),
    "closure": lambda m, x: PLACES["closure"](x),
    "class": lambda m, x: Registry.layer(x) * (2 if Registry.layer is m.first else 3),
    "key": lambda m, x: m.first(x) * BY_MODULE[m.first],
    "keys": _each,
    "set": lambda m, x: m.first(x) * (2 if m.second in CHOSEN else 3),
    "items of a set": lambda m, x: _every(CHOSEN, x),
    "deque": lambda m, x: RECENT[0](x) * (2 if RECENT[0] is m.second else 3),
    "weak key": lambda m, x: m.first(x) * WEAKLY[m.first],
    "set by another way": _set_by_another_way,
}


def _trains_as_plain(model: Known, found: Callable[[], Any], budget: Any = 1.0) -> Any:
    """Compare four steps, and what is `found` outside, with those of the model itself."""
    model.be_known()
    planned = Rockmate(model, torch.randn(6, 8), budget, cost="flops", cache=False)
    samples = torch.randn(4, 6, 8)
    seen = []
    for module in (planned, model):
        model.be_known()
        model.part.count = 0
        for sample in samples:
            model.zero_grad()
            result = module(sample)
            result.square().sum().backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            seen.append((found(), [result.detach(), *gradients]))
    for (ours, tensors), (plain, others) in zip(seen[:4], seen[4:], strict=True):
        assert ours == plain
        assert len(tensors) == len(others)
        assert all(map(torch.equal, tensors, others))
    return planned.plan


@pytest.mark.parametrize("name", READ)
def test_an_own_part_is_planned_by_whichever_way_it_is_read(name: str) -> None:
    model = Known(READ[name])
    plan = _trains_as_plain(model, lambda: None)
    assert not plan.opaque
    # All is as it was.
    assert PLACES["model"] is model
    assert PLACES["ref"]() is model.first
    assert PLACES["both"][1] is model.second
    assert Registry.layer is model.first
    assert [*BY_MODULE] == [model.first, model.second] == [*WEAKLY]
    assert {model.second} == CHOSEN == {*RECENT}


def _counted(model: Known, x: Tensor) -> Tensor:
    WEAKLY[model.first] += 1
    return model.first(x) * WEAKLY[model.first]


def _remembered(model: Known, x: Tensor) -> Tensor:
    COUNTED.add(model.first)
    return model.first(x) * len(COUNTED)


def _named(model: Known, x: Tensor) -> Tensor:
    NAMED["again"] = model.part
    return model.first(x) * len(NAMED)


def _of_named(model: Known, x: Tensor) -> Tensor:
    NAMED["part"].count += 1
    return model.first(x) * NAMED["part"].count


@pytest.mark.parametrize("run", [_counted, _remembered, _named, _of_named])
def test_what_is_written_where_nothing_is_kept_alive(run: Forward) -> None:
    model = Known(run)
    _trains_as_plain(
        model, lambda: (WEAKLY[model.first], len(COUNTED), sorted(NAMED), model.part.count)
    )


@pytest.mark.parametrize("key", ["layer", "both"])
def test_another_part_in_the_place_is_seen(key: str) -> None:
    model = Known(READ["tuple" if key == "both" else key])
    model.be_known()
    planned = Rockmate(model, torch.randn(6, 8), "1MiB", cost="flops", cache=False)
    x = torch.randn(6, 8)
    before = planned(x)
    PLACES[key] = (model.second, model.first) if key == "both" else model.second
    assert torch.equal(planned(x), model(x))
    assert not torch.equal(planned(x), before)


def _to_parent(child: Any, x: Tensor) -> Tensor:
    child.parent[0].count += 1
    return child.layer(x) * child.parent[0].count  # type: ignore[no-any-return]


def _from_parent(child: Any, x: Tensor) -> Tensor:
    return child.layer(x) * child.parent[0].between  # type: ignore[no-any-return]


class Child(nn.Module):
    def __init__(self, parent: nn.Module, run: Forward) -> None:
        super().__init__()
        self.layer, self.parent, self.run = nn.Linear(8, 8), [parent], run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Parent(nn.Module):
    """Has a child that knows it."""

    def __init__(self, run: Forward, *, decides: bool) -> None:
        super().__init__()
        self.first, self.last, self.decides = nn.Linear(8, 8), nn.Linear(8, 4), decides
        self.count, self.between = 0, torch.zeros(())
        self.child = Child(self, run)

    def forward(self, x: Tensor) -> Tensor:
        self.between = torch.sigmoid(h := self.first(x))
        if self.decides and h.sum() > 0:
            h = h * 2
        result: Tensor = self.last(self.child(h))
        return result * (1 + self.count)


@pytest.mark.parametrize("run", [_to_parent, _from_parent])
@pytest.mark.parametrize("decides", [False, True])
def test_a_child_that_knows_the_model(run: Forward, decides: bool) -> None:
    model = Parent(run, decides=decides)
    twin = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(6, 8), 1.0, cost="flops", cache=False)
    for _ in range(4):
        x = torch.randn(6, 8)
        for module in (planned, twin):
            module.zero_grad()
            module(x).square().sum().backward()
        assert model.count == twin.count
        assert torch.equal(model.between, twin.between)
        assert_same_gradients(model, twin)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.blocks = nn.ModuleList(Child(self, self.run) for _ in range(3))

    @staticmethod
    def run(child: Any, x: Tensor) -> Tensor:
        return torch.tanh(child.layer(x)) * child.parent[0].scale

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_that_know_the_model() -> None:
    model = Stack()
    twin = copy.deepcopy(model)
    apply_to_blocks(model, torch.randn(6, 8), "1MiB", cost="flops")
    for model.scale in (2.0, 2.0, 3.0):
        twin.scale = model.scale
        x = torch.randn(6, 8)
        for module in (model, twin):
            module.zero_grad()
            module(x).square().sum().backward()
        assert_same_gradients(model, twin)


def test_sizes_of_a_model_that_is_known_outside() -> None:
    model = Known(READ["layer"])
    model.be_known()
    assert estimate(model, torch.randn(6, 8)).activations_bytes > 0
    assert largest_batch(model, lambda n: torch.randn(n, 8), "100KB").batch > 100
    assert PLACES["layer"] is model.first
