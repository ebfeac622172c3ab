"""Functions under `lru_cache`: what they remember after each step is what plain steps leave."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rockmate import InfeasibleBudgetError, Rockmate, largest_batch

ROOM_BYTES = 1_000_000  # more than any of these takes


class Calls(nn.Module):
    """It calls a function between two layers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(8, 8), nn.Linear(8, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(torch.tanh(self.first(x))))


class WithMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 4), 1.0

    @functools.lru_cache  # noqa: B019 (as users do)
    def scaled(self, size: int) -> float:
        return self.scale * size

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scaled(x.shape[0])


class KeyedByBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * _doubled(self.table)


@functools.lru_cache(maxsize=4)
def _doubled(tensor: Tensor) -> Tensor:
    return tensor * 2


Made = tuple[nn.Module, Callable[[nn.Module, int], object]]
MADE: dict[str, Callable[[], Made]] = {}


def of(name: str) -> Callable[[Callable[[], Made]], None]:
    return lambda maker: MADE.update({name: maker})


@of("a method of a module")
def _() -> Made:
    WithMethod.scaled.cache_clear()
    return WithMethod(), lambda model, step: setattr(model, "scale", 1.0 + step)


@of("by a buffer")
def _() -> Made:
    _doubled.cache_clear()
    return KeyedByBuffer(), lambda model, step: step == 2 and model.table.mul_(3)


class Memory:
    """Is copied with the module that holds it."""

    base = 0.5

    @functools.lru_cache  # noqa: B019 (as users do)
    def scale(self, number: int) -> float:
        return self.base / number


@of("a method of an object")
def _() -> Made:
    model = Calls(torch.relu)
    model.memory = Memory()
    model.function = functools.partial(_scaled, model)
    return model, lambda model, step: setattr(model.memory, "base", 0.5 + step)


def _scaled(model: nn.Module, x: Tensor) -> Tensor:
    return x * model.memory.scale(x.dim())


@of("by the input, which changes in place")
def _() -> Made:
    @functools.lru_cache(maxsize=4)
    def summed(x: Tensor) -> Tensor:
        return x.sum(0)

    return Calls(lambda x: x + summed(GIVEN)), lambda _, step: step == 2 and GIVEN.mul_(3)


GIVEN = torch.ones(6, 8)


def _with_result(make: Callable[[], Any], read: Callable[[Any], Any], change: Any) -> Made:
    @functools.lru_cache
    def made() -> Any:
        return make()

    return Calls(lambda x: x * read(made())), lambda _, step: step > 1 and change(made(), step)


@of("a dict")
def _() -> Made:
    def change(held: dict[str, float], step: int) -> None:
        held["scale"] = float(step)

    return _with_result(lambda: {"scale": 1.0}, lambda held: held["scale"], change)


@of("an object")
def _() -> Made:
    def change(held: Any, step: int) -> None:
        held.scales[0] = float(step)

    return _with_result(lambda: SimpleNamespace(scales=[1.0]), lambda held: held.scales[0], change)


@of("a tensor")
def _() -> Made:
    return _with_result(lambda: torch.ones(8), lambda held: held, lambda held, _: held.mul_(1.5))


@of("what it counts, and evicts")
def _() -> Made:
    count = 0

    @functools.lru_cache(maxsize=1)
    def counted(_: int) -> float:
        nonlocal count
        count += 1
        return float(count)

    return Calls(lambda x: x * counted(1)), lambda _, step: step == 2 and counted(2)


@pytest.mark.parametrize("name", MADE)
def test_steps_are_those_of_plain_pytorch(name: str) -> None:
    found: list[list[Tensor]] = []
    state: Any = None
    for is_planned in (False, True):
        GIVEN.fill_(1)
        torch.manual_seed(0)
        model, change = MADE[name]()
        state = copy.deepcopy(model.state_dict()) if state is None else state
        model.load_state_dict(state)
        called = Rockmate(model, (torch.randn(6, 8),), ROOM_BYTES) if is_planned else model
        found.append([])
        for step in range(4):
            change(model, step)
            torch.manual_seed(step)
            out = called(torch.randn(6, 8))
            out.sum().backward()
            found[-1].append(out.detach().clone())
    for expected, ours in zip(*found, strict=True):
        assert torch.equal(expected, ours)


def test_results_by_plain_values_are_constants_of_the_plan() -> None:
    @functools.lru_cache
    def table(size: int) -> Tensor:
        return torch.linspace(0, 1, size)

    planned = Rockmate(Calls(lambda x: x * table(8)), (torch.randn(6, 8),), ROOM_BYTES)
    for _ in range(3):
        planned(torch.randn(6, 8)).sum().backward()
    assert planned.plan.opaque == ()
    assert len(planned.plans) == 1
    assert table.cache_info().currsize == 1


def test_no_function_remembers_tensors_without_content() -> None:
    @functools.lru_cache
    def table(size: int) -> Tensor:
        return torch.linspace(0, 1, size)

    model = Calls(lambda x: x * table(8))
    for _ in range(2):  # an earlier estimate leaves nothing for the next one
        largest_batch(model, lambda batch: torch.randn(batch, 8), memory="1MB")
        assert type(table(8)) is Tensor
        assert torch.equal(table(8), torch.linspace(0, 1, 8))
        table.cache_clear()


class SaysOnce(nn.Module):
    """Its function says each number once; what it keeps of its first call makes it run whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(8, 8), None
        self.said: list[int] = []

        @functools.lru_cache(maxsize=4)
        def say(number: int) -> None:
            self.said.append(number)

        self.say = say

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.full_like(x[:1].detach(), 0.5)
        self.say(x.shape[-1])
        return self.layer(x) * self.kept


@pytest.mark.parametrize("before", [(), (3,)], ids=["nothing", "something else"])
def test_planning_computes_nothing_for_a_step_that_calls_again(before: tuple[int, ...]) -> None:
    """Also where a budget was refused before, or the function remembered something."""
    model = SaysOnce()
    for number in before:
        model.say(number)
    with pytest.raises(InfeasibleBudgetError) as refused:
        Rockmate(model, (torch.randn(6, 8),), 1000)
    assert model.said == [*before]
    planned = Rockmate(model, (torch.randn(6, 8),), refused.value.minimum_bytes)
    assert model.said == [*before]
    assert model.say.cache_info().currsize == len(before)
    for _ in range(2):
        planned(torch.randn(6, 8)).sum().backward()
        assert model.said == [*before, 8]
    for number in range(20, 27):  # it drops what it has not needed for longest
        model.say(number)
    assert model.say.cache_info().currsize == 4


SCALES = {"now": 2.0}


@functools.lru_cache
def _table(size: int) -> Tensor:
    return torch.arange(size) * SCALES["now"]


@functools.cache
def _number(size: int) -> float:
    return size * SCALES["now"]


@pytest.mark.parametrize("first", ["a step", "a call without gradients"])
@pytest.mark.parametrize("kept", [_table, _number])
def test_what_planning_computes_is_forgotten_if_what_it_reads_changes_before_steps(
    kept: Callable[[int], Any], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later changes are none: what functions remember stays as it was then."""
    torch.manual_seed(0)
    plain, x = Calls(lambda x: x * kept(8)), torch.randn(6, 8)
    model, results = copy.deepcopy(plain), []
    for is_planned in (True, False):
        kept.cache_clear()  # type: ignore[attr-defined]
        monkeypatch.setitem(SCALES, "now", 2.0)
        net = plain
        if is_planned:
            net = Rockmate(model, (x,), ROOM_BYTES, cost="flops", cache=False, progress=False)
        SCALES["now"] = 3.0
        with torch.set_grad_enabled(first == "a step"):
            found = [net(x).detach()]
        SCALES["now"] = 4.0
        y = net(x)
        y.sum().backward()
        results.append([*found, y.detach(), *(p.grad for p in net.parameters())])
    assert all(map(torch.equal, *results))
