"""Numbers, flags, text and objects that reach a module that runs whole: each call has its own."""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rockmate import Rockmate


class Mode(enum.Enum):
    """How to join."""

    ADD = 1
    MULTIPLY = 2


@dataclass
class Choice:
    """A configuration."""

    scale: float
    words: tuple[str, ...] = ()


class Gated(nn.Module):
    """Cannot be recorded: it looks at what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, how: Any = 1.0) -> Tensor:
        h = self.a(x).sin()
        if h.mean() > 100:
            h = h / 2
        return self.b(_computed(h, how))


def _computed(h: Tensor, how: Any) -> Tensor:
    match how:
        case None:
            return h
        case bool():
            return -h if how else h.cos()
        case str():
            return h * len(how)
        case Mode():
            return h + 2 if how is Mode.ADD else h * 2
        case Choice():
            return h * how.scale + len(how.words)
        case torch.Size():
            return h * how.numel()
        case dict() | list():
            for value in how.values() if isinstance(how, dict) else how:
                h = _computed(h, value)
            return h
    return h * how


class Outer(nn.Module):
    """Hands what it gets to two modules that run whole, among others that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Gated(), nn.Linear(16, 16), Gated()

    def forward(self, x: Tensor, how: Any, more: Any = None) -> Tensor:
        x = self.middle(self.first(x, how).tanh())
        return self.last(x, how=how if more is None else [more, how])


class Halved(Outer):
    """Computes what it hands over."""

    def forward(self, x: Tensor, how: Any, more: Any = None) -> Tensor:
        return super().forward(x, how * 0.5 + 1, more)


def assert_equal_for(
    module: nn.Module, values: list[Any], most_plans: int, budget: Any = "1MiB"
) -> Rockmate:
    plain, x = copy.deepcopy(module), torch.randn(64, 16)
    planned = Rockmate(module, (x, values[0]), budget, cost="flops")
    for value in [*values, *values[:2]]:
        found = []
        for each in (planned, plain):
            each.zero_grad()
            result = each(x, copy.deepcopy(value))
            result.square().sum().backward()
            found.append([result, *(p.grad for p in each.parameters())])
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs), value
    source = planned.plan.source()
    assert any(f"run_{name}(" in source for name in ("Gated", "Scaled", "Repeated", "Net"))
    assert len(planned.plans) <= most_plans, planned.plans
    return planned


ANNEALED = [1 - step / 7 for step in range(6)]


@pytest.mark.parametrize("make", [Outer, Halved, Gated])
@pytest.mark.parametrize("values", [ANNEALED, [3, 4, 5, 9, 100, -1]], ids=["floats", "ints"])
def test_numbers_that_change_cost_one_more_plan(make: Any, values: list[Any]) -> None:
    assert_equal_for(make(), values, most_plans=2)


def test_numbers_reach_what_is_computed_again() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Outer() for _ in range(4))

        def forward(self, x: Tensor, how: Any) -> Tensor:
            for block in self.blocks:
                x = block(x, how)
            return x

    planned = assert_equal_for(Deep(), ANNEALED, 2, budget=0.7)
    assert "run_Gated_again" in planned.plan.source()


@pytest.mark.parametrize(
    "values",
    [
        [False, True],
        ["a", "abc", ""],
        [None, 2.0, 3, True],
        [Mode.ADD, Mode.MULTIPLY],
        [Choice(0.5), Choice(0.25), Choice(0.25, ("a",))],
        [{"a": 2.0, "b": True}, {"a": 3.0, "b": True}, {"a": 3.0, "b": False}],
        [[0.5, [2, "ab"]], [0.25, [2, "ab"]], [0.25, [2, "a"]], [0.25, [3, "a"]]],
        [0.0, -0.0, 1e-30],
        [1, 1.0, True],
        [torch.Size([2, 3]), torch.Size([3, 3]), [torch.Size([2])]],
    ],
    ids=str,
)
def test_what_is_no_annealed_number(values: list[Any]) -> None:
    assert_equal_for(Outer(), values, most_plans=len(values) + 1)


def test_a_number_that_says_how_much_is_computed() -> None:
    class Repeated(Gated):
        def forward(self, x: Tensor, how: Any = 1) -> Tensor:
            for _ in range(how):
                x = super().forward(x)
            return x

    assert_equal_for(Repeated(), [1, 2, 4, 3], most_plans=4)


def test_a_number_that_is_compared() -> None:
    class Warm(Outer):
        def forward(self, x: Tensor, how: Any, more: Any = None) -> Tensor:
            return super().forward(x, how, "ab" if how > 0.5 else 2)

    assert_equal_for(Warm(), ANNEALED, most_plans=4)


def test_a_number_for_a_function_that_is_one_operation() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
            ctx.by = by
            return torch.from_numpy(x.detach().numpy() * 1) * by

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return torch.from_numpy(grads[0].numpy() * 1) * ctx.by, None

    class Net(Gated):
        def forward(self, x: Tensor, how: Any = 1.0) -> Tensor:
            scaled: Tensor = Scaled.apply(self.a(x), how)
            return self.b(scaled)

    assert_equal_for(Net(), ANNEALED, most_plans=2)


def test_a_number_that_is_an_attribute() -> None:
    class Net(Outer):
        scale = 1.0

        def forward(self, x: Tensor, how: Any, more: Any = None) -> Tensor:
            return super().forward(x, self.scale)

    module, x = Net(), torch.randn(64, 16)
    plain, planned = copy.deepcopy(module), Rockmate(module, (x, 0), "1MiB", cost="flops")
    for value in ANNEALED:
        plain.scale = planned.scale = value
        assert torch.equal(planned(x, 0), plain(x, 0)), value
    assert len(planned.plans) <= 3, planned.plans
