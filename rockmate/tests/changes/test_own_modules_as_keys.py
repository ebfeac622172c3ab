"""A forward that looks its own modules up in what lies outside: a recording's are copies."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rockmate import Rockmate

_factors: dict[Any, float] = {}
_weakly: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
_chosen: set[Any] = set()
_ids: set[int] = set()


class Scaled(nn.Module):
    factors: ClassVar[weakref.WeakKeyDictionary[Any, float]] = weakref.WeakKeyDictionary()

    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).sin() * self.read(self))
        return y


# What reads, and what changes it for a model.
KEYED: dict[str, tuple[Callable[[Any], float], Callable[[Any, float], object]]] = {
    "dict": (
        lambda m: _factors.get(m.last, 1.0),
        lambda m, f: _factors.__setitem__(m.last, f),
    ),
    "of parameters": (
        lambda m: _factors.get(m.last.weight, 1.0),
        lambda m, f: _factors.__setitem__(m.last.weight, f),
    ),
    "weak": (
        lambda m: _weakly.get(m.last, 1.0),
        lambda m, f: _weakly.__setitem__(m.last, f),
    ),
    "set": (lambda m: 2.0 if m.last in _chosen else 1.0, lambda m, f: _chosen.add(m.last)),
    "identity": (lambda m: 2.0 if id(m.last) in _ids else 1.0, lambda m, f: _ids.add(id(m.last))),
    "class": (
        lambda m: m.factors.get(m.last, 1.0),
        lambda m, f: Scaled.factors.__setitem__(m.last, f),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYED)
def test_what_is_kept_for_a_module_is_found(name: str) -> None:
    read, change = KEYED[name]
    torch.manual_seed(0)
    model = Scaled(read)
    twin = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(8, 16), "1MiB", cost="flops")
    for step in range(4):
        x = torch.randn(8, 16)
        for module, owner in ((planned, model), (twin, twin)):
            if step in (1, 3):
                change(owner, 2.0 + step)
            module.zero_grad()
            module(x).square().sum().backward()
        assert_same_gradients(model, twin)


class Gain:
    value = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.value

    def apply(self, x: Tensor) -> Tensor:
        return x * self.value


@pytest.mark.parametrize("kind", ["method", "proxy"])
def test_what_a_weak_reference_leads_to_may_change(kind: str) -> None:
    gain = Gain()
    method = weakref.WeakMethod(gain.apply)
    proxy: Any = weakref.proxy(gain)

    class Gained(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            apply: Any = method() if kind == "method" else proxy.apply
            result: Tensor = apply(super().forward(x))
            return result

    model = Gained(16, 16)
    planned = Rockmate(model, torch.randn(8, 16), "1MiB", cost="flops")
    for gain.value in (1.0, 3.0, 1.0, 2.0):
        x = torch.randn(8, 16)
        assert torch.equal(planned(x), model(x))


def test_an_error_of_a_kernel_that_the_forward_catches() -> None:
    class Tries(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x @ torch.ones(3, 3))
            except RuntimeError:
                return super().forward(x.sin())

    model = Tries(16, 16)
    planned, x = Rockmate(model, torch.randn(8, 16), "1MiB", cost="flops"), torch.randn(8, 16)
    assert torch.equal(planned(x), model(x))


def test_a_forward_that_sets_the_default_dtype_runs_whole() -> None:
    class Doubles(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            torch.set_default_dtype(torch.float64)
            try:
                factor = torch.ones(16) * 0.1
            finally:
                torch.set_default_dtype(torch.float32)
            return super().forward(x) * factor

    model = Doubles(16, 16)
    planned, x = Rockmate(model, torch.randn(8, 16), "1MiB", cost="flops"), torch.randn(8, 16)
    assert torch.equal(planned(x), model(x))
    assert planned(x).dtype is torch.float64


@pytest.mark.parametrize("kind", ["generator", "iterator"])
def test_an_argument_that_changes_by_being_used_is_refused_unused(kind: str) -> None:
    class Takes(nn.Linear):
        def forward(self, x: Tensor, more: Any) -> Tensor:
            noise = torch.rand(16, generator=more) if kind == "generator" else next(more)
            return super().forward(x) + noise

    generator = torch.Generator().manual_seed(3)
    before, values = generator.get_state(), iter([1.0])
    more: Any = generator if kind == "generator" else values
    with pytest.raises(Exception, match="changes by being used"):
        Rockmate(Takes(16, 16), (torch.randn(8, 16), more), "1MiB", cost="flops")
    assert torch.equal(generator.get_state(), before)
    assert next(values) == 1.0
