"""What a forward sets on modules and parameters is what a plain forward would have set.

Values of every kind, under names with and without an underscore, however they are written.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import decimal
import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rockmate import Rockmate


class Mood(enum.Enum):
    CALM = 1.0
    WILD = 2.0


@dataclasses.dataclass(frozen=True)
class Count:
    n: int = 0


def _count_in_vars(module: Any) -> float:
    vars(module)["kept"] = vars(module).get("kept", 0) + 1
    return float(module.kept)


def _count_on_parameter(module: Any) -> float:
    weight = module.first.weight
    weight.kept = getattr(weight, "kept", 0) + 1
    return float(weight.kept)


def _set(module: Any, name: str, value: Any, factor: float) -> float:
    setattr(module, name, value)
    return factor


def _turn_mood(module: Any) -> float:
    module.kept = Mood.WILD if module.kept is Mood.CALM else Mood.CALM
    return float(module.kept.value)


def _swap(module: Any) -> float:
    module.first, module.other = module.other, module.first
    return 1.0


def _remove(module: Any) -> float:
    if "kept" in vars(module):
        del module.kept
        return 2.0
    return 1.0


def _turn_order(module: Any) -> float:
    module.kept.move_to_end(next(iter(module.kept)))
    return float(next(iter(module.kept.values())))


def _count_by_lambda(module: Any) -> float:
    n = module.kept(1) + 1
    module.kept = lambda k: k * n
    return float(n)


def _freeze(module: Any) -> float:
    module.other.requires_grad_(False)
    return 1.0


# What is there before, and what a forward does, which gives a factor.
SETS: dict[str, tuple[Any, Callable[[Any], float]]] = {
    "private counter": (0, lambda m: _set(m, "_kept", m._kept + 1, m._kept)),
    "private text": ("", lambda m: _set(m, "_kept", m._kept + "x", len(m._kept))),
    "tuple": ((1,), lambda m: _set(m, "kept", (*m.kept, 1), sum(m.kept))),
    "bytes": (b"", lambda m: _set(m, "kept", m.kept + b"x", len(m.kept))),
    "complex": (1j, lambda m: _set(m, "kept", m.kept * 1j, 2 + m.kept.real)),
    "decimal": (
        decimal.Decimal(1),
        lambda m: _set(m, "kept", m.kept + 1, float(m.kept)),
    ),
    "range": (range(1), lambda m: _set(m, "kept", range(len(m.kept) + 1), len(m.kept))),
    "record": (Count(), lambda m: _set(m, "kept", Count(m.kept.n + 1), m.kept.n)),
    "member": (Mood.CALM, _turn_mood),
    "nothing": (1.0, lambda m: _set(m, "kept", None, 1.0 if m.kept is None else 2.0)),
    "dtype": (
        torch.int8,
        lambda m: _set(m, "kept", torch.float16, 2.0 if m.kept is torch.int8 else 1.0),
    ),
    "function": (
        torch.cos,
        lambda m: _set(
            m, "kept", torch.sin if m.kept is torch.cos else torch.cos, 2.0
        ) if m.kept is torch.cos else _set(m, "kept", torch.cos, 1.0),
    ),
    "lambda": (lambda k: k, _count_by_lambda),
    "by vars": (None, _count_in_vars),
    "of a parameter": (None, _count_on_parameter),
    "submodules": (None, _swap),
    "removed": (1.0, _remove),
    "order": (collections.OrderedDict(a=1.0, b=2.0), _turn_order),
    "frozen": (None, _freeze),
}  # fmt: skip


class Sets(nn.Module):
    def __init__(self, kept: Any, work: Callable[[Any], float]) -> None:
        super().__init__()
        self.first, self.other, self.last = (nn.Linear(16, 16) for _ in range(3))
        self.work = work
        if kept is not None:
            self.kept, self._kept = kept, kept

    def forward(self, x: Tensor) -> Tensor:
        factor = self.work(self)
        y: Tensor = self.last(self.other(self.first(x).sin()).sin() * factor)
        return y


def _kept(module: nn.Module) -> list[Any]:
    weight = module.get_parameter("first.weight")
    values = [getattr(module, "kept", None), getattr(module, "_kept", None), vars(weight)]
    return [v(1) if type(v) is type(_kept) else v for v in values]


@pytest.mark.parametrize("name", SETS)
def test_every_step_sets_what_a_plain_step_sets(name: str) -> None:
    kept, work = SETS[name]
    torch.manual_seed(0)
    model = Sets(kept, work)
    twin = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(8, 16), "1MiB", cost="flops")
    assert _kept(model) == _kept(twin), "planning sets nothing"
    for _ in range(3):
        x = torch.randn(8, 16)
        for module in (planned, twin):
            module.zero_grad()
            module(x).square().sum().backward()
        assert _kept(model) == _kept(twin)
        flags = [[p.requires_grad for p in m.parameters()] for m in (model, twin)]
        assert flags[0] == flags[1]
        assert_same_gradients(model, twin)


def test_a_function_that_a_library_has_is_set_without_running_anything_whole() -> None:
    model = Sets(torch.cos, lambda m: _set(m, "kept", torch.sin, 1.0))
    planned = Rockmate(model, torch.randn(8, 16), "1MiB", cost="flops")
    planned(torch.randn(8, 16)).sum().backward()
    assert model.kept is torch.sin
    assert not planned.plan.opaque
