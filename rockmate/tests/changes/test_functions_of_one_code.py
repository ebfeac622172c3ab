"""Functions that share their code: each has its own variables around it, and its own defaults."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from rockmate import Rockmate

ROOM_BYTES = 1_000_000  # more than any of these takes
ALIVE: list[Any] = []  # other functions of the same codes


class Calls(nn.Module):
    """It calls some functions between two layers."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last, self.functions = nn.Linear(8, 8), nn.Linear(8, 4), functions

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for function in self.functions:
            x = function(x)
        return self.last(x)


def _counter(begin: int) -> Callable[[Tensor], Tensor]:
    count = begin

    def counted(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * count

    return counted


def _counter_in_a_comprehension(begin: int) -> Callable[[Tensor], Tensor]:
    count = begin

    def counted(x: Tensor) -> Tensor:
        nonlocal count
        return x * sum(count := count + 1 for _ in range(2))

    return counted


def _counter_and_a_setter(scale: float) -> tuple[Callable[[Tensor], Tensor], Any]:
    count = 0

    def increment() -> None:
        nonlocal count
        count += 1

    def counted(x: Tensor) -> Tensor:
        increment()
        return x * count * scale

    def set_scale(value: float) -> None:
        nonlocal scale
        scale = value

    return counted, set_scale


def _with_default(scale: float) -> Any:
    def scaled(x: Tensor, by: list[float] = [scale]) -> Tensor:  # noqa: B006
        return x * by[0]

    return scaled


def _reading_inside(scale: float) -> tuple[Callable[[Tensor], Tensor], Any]:
    def scaled(x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return y * scale

        return inner(x)

    def set_scale(value: float) -> None:
        nonlocal scale
        scale = value

    return scaled, set_scale


def _without_variables() -> Any:
    def doubled() -> float:
        return 2.0

    return doubled


def _tripled() -> float:
    return 3.0


Made = tuple[list[Callable[..., Any]], Callable[[int], object]]


def _counters(make: Callable[[int], Any]) -> Made:
    ALIVE.append(make(0))
    return [make(0), make(2)], lambda _: None


def _set_later() -> Made:
    ALIVE.append(_counter_and_a_setter(1.0))
    counted, set_scale = _counter_and_a_setter(1.0)
    return [counted], lambda step: step == 2 and set_scale(3.0)


def _defaults() -> Made:
    ALIVE.append(_with_default(1.0))
    scaled = _with_default(1.0)
    return [
        scaled
    ], lambda step: step == 2 and scaled.__defaults__[0].append(scaled.__defaults__[0].pop() + 2)


def _inside() -> Made:
    ALIVE.append(_reading_inside(1.0))
    scaled, set_scale = _reading_inside(1.0)
    return [scaled], lambda step: step == 2 and set_scale(3.0)


def _other_code() -> Made:
    ALIVE.append(_without_variables())
    function = _without_variables()

    def change(step: int) -> None:
        if step == 2:
            function.__code__ = _tripled.__code__

    return [lambda x: x * function()], change


MADE: dict[str, Callable[[], Made]] = {
    "counters": lambda: _counters(_counter),
    "counters in comprehensions": lambda: _counters(_counter_in_a_comprehension),
    "a variable beside a counter": _set_later,
    "a default": _defaults,
    "read by an inner function": _inside,
    "the code": _other_code,
}


def _steps(call: Callable[[Tensor], Tensor], change: Callable[[int], object]) -> list[Tensor]:
    found = []
    for step in range(4):
        change(step)
        torch.manual_seed(step)
        out = call(torch.randn(6, 8))
        out.sum().backward()
        found.append(out.detach().clone())
    return found


@pytest.mark.parametrize("name", MADE)
def test_each_has_its_own_variables(name: str) -> None:
    """Twice, because what was looked up for the first model may not be all for the second."""
    for _ in range(2):
        functions, change = MADE[name]()
        torch.manual_seed(0)
        model = Calls(*functions)
        state = copy.deepcopy(model.state_dict())
        plain = _steps(model, change)
        functions, change = MADE[name]()
        model = Calls(*functions)
        model.load_state_dict(state)
        planned = Rockmate(model, (torch.randn(6, 8),), ROOM_BYTES)
        for expected, found in zip(plain, _steps(planned, change), strict=True):
            assert torch.equal(expected, found)


def test_classes_that_share_a_method_have_their_own_lists() -> None:
    class Logging(nn.Module):
        log: ClassVar[list[int]]

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            type(self).log.append(1)
            return self.layer(x) * len(type(self).log)

    class One(Logging):
        log: ClassVar = []

    class Two(Logging):
        log: ClassVar = [1]

    def begin() -> None:
        One.log[:], Two.log[:] = [], [1]

    torch.manual_seed(0)
    model = nn.Sequential(One(), Two())
    plain = _steps(model, lambda _: None)
    begin()
    planned = Rockmate(model, (torch.randn(6, 8),), ROOM_BYTES)
    assert (One.log, Two.log) == ([], [1])
    for expected, found in zip(plain, _steps(planned, lambda _: None), strict=True):
        assert torch.equal(expected, found)


def test_functions_that_were_frozen_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where tests see what they have frozen themselves.
    for name in ("outside.changes", "guards.sources"):
        monkeypatch.setattr(f"rkgb.{name}.gc", gc)
    counted, set_scale = _counter_and_a_setter(1.0)
    model = Calls(counted)
    gc.freeze()
    try:
        planned = Rockmate(model, (torch.randn(6, 8),), ROOM_BYTES)
        found = []
        for scale in (1.0, 1.0, 3.0):
            set_scale(scale)
            found.append(planned(torch.ones(6, 8)) - model.last.bias)
        assert torch.allclose(found[2], found[0] * 9)
    finally:
        gc.unfreeze()
