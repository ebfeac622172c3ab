"""Submodules that run whole from some call on: what was planned otherwise serves no more."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rockmate import Rockmate, UnsupportedModuleError

# Hooks of these tests keep the gradients that they see.
pytestmark = pytest.mark.filterwarnings("ignore:hooks of module")


class Scaled(nn.Module):
    """Computes with what nobody sees."""

    scales: dict[str, float] = {}  # noqa: RUF012 (what a recording must not know of)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin() * _read(self.scales)


def _read(scales: dict[str, float]) -> float:
    return scales.get("scale", 1.0)


def net() -> nn.Sequential:
    return nn.Sequential(Scaled(), nn.GELU(), nn.Linear(16, 16), Scaled(), nn.GELU())


def test_later_calls_run_them_whole_and_nothing_else() -> None:
    module, x = net(), torch.randn(32, 16)
    plain = copy.deepcopy(module)
    planned = Rockmate(module, x, "1MiB", cost="flops")
    bytes_before = planned.budget_bytes
    assert planned.plan.opaque == ()
    planned._rockmate.run_whole(["0", "3.linear"], "it reads what nobody sees")
    assert len(planned.plans) == 0
    for _ in range(2):
        assert torch.equal(planned(x), plain(x))
    assert planned.plan.opaque == ("0", "3.linear")
    assert len(planned.plans) == 1
    assert planned.budget_bytes == bytes_before
    planned._rockmate.run_whole(["3"], "it reads what nobody sees")
    assert torch.equal(planned(x), plain(x))
    assert planned.plan.opaque == ("0", "3")
    planned._rockmate.run_whole(["0"], "again")
    assert len(planned.plans) == 1, "a plan that runs it whole already stays"


def test_strict_refuses() -> None:
    planned = Rockmate(net(), torch.randn(32, 16), "1MiB", cost="flops", strict=True)
    with pytest.raises(UnsupportedModuleError, match=r"'0' of Sequential .*what nobody sees"):
        planned._rockmate.run_whole(["0"], "it reads what nobody sees")


@pytest.mark.parametrize("hooked", [("1",), ("0", "2"), ("1.1",)])
def test_of_equal_layers_those_with_hooks_run_whole(hooked: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(4)))
    plain, x = copy.deepcopy(model), torch.randn(64, 16, requires_grad=True)
    seen: dict[nn.Module, list[Tensor]] = {model: [], plain: []}
    for net in (model, plain):
        for path in hooked:
            net.get_submodule(path).register_full_backward_hook(
                lambda _, given, got, net=net: seen[net].extend((*given, *got))
            )
    planned = Rockmate(model, x, 0.8, cost="flops")
    assert planned.plan.opaque == hooked
    for _ in range(2):
        for net in (planned, plain):
            net(x).square().sum().backward()
    assert len(seen[model]) == len(seen[plain]) > 0
    assert all(map(torch.equal, seen[model], seen[plain]))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", ["1MiB", 0.8])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_what_calls_a_function_made_by_torch_jit_runs_whole(budget: float | str) -> None:
    """Its second call computes gradients otherwise than its first, in plain PyTorch, too."""

    class Gated(nn.Module):
        def __init__(self, function: torch.jit.ScriptFunction) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 32)
            self.call = lambda x, y: function(x, y)

        def forward(self, x: Tensor) -> Tensor:
            return self.call(*self.linear(x).chunk(2, -1))

    def train(budget: float | str | None) -> list[Tensor]:
        def gated(x: Tensor, y: Tensor) -> Tensor:  # one that has never been called
            return torch.tanh(x) * torch.sigmoid(1.702 * y) * y

        torch.manual_seed(0)
        ends = [[nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)] for _ in range(2)]
        net = nn.Sequential(*ends[0], Gated(torch.jit.script(gated)), *ends[1])
        call = net if budget is None else Rockmate(net, torch.ones(64, 16), budget, cost="flops")
        if budget is not None:
            assert call.plan.opaque == ("3",)
        found = []
        for _ in range(4):
            net.zero_grad()
            y = call(torch.randn(64, 16))
            y.square().sum().backward()
            found += [y.detach(), *(p.grad for p in net.parameters())]
        return found

    assert all(map(torch.equal, train(budget), train(None)))


class Listed(nn.Module):
    """Calls the layers of a list, and of a part that it never calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 64) for _ in range(3))
        self.down = nn.Sequential(*(nn.Linear(64, 16) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.nn.functional.gelu(up(x)))
        return x


@pytest.mark.parametrize("budget", ["1MiB", 0.9])
def test_hooks_of_all_modules_see_gradients(budget: float | str) -> None:
    """Those of lists, too, which are never called and so never see any."""
    torch.manual_seed(0)
    nets = (model := Listed()), (plain := copy.deepcopy(model))
    seen: dict[nn.Module, list[Tensor]] = {model: [], plain: []}
    for net in nets:
        for module in list(net.modules())[1:]:
            module.register_full_backward_hook(
                lambda _, given, got, net=net: seen[net].extend((*given, *got))
            )
    x = torch.randn(64, 16, requires_grad=True)
    planned = Rockmate(model, x, budget, cost="flops")
    assert planned.plan.opaque == tuple(f"{p}.{n}" for n in range(3) for p in ("up", "down"))
    for net in (planned, plain):
        net(x).square().sum().backward()
    assert len(seen[model]) == len(seen[plain]) > 0
    assert all(map(torch.equal, seen[model], seen[plain]))


def test_gradients_that_a_hook_keeps_are_not_written_to() -> None:
    """Neither by what computes on with them, nor by gradients that are added to them."""
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    first = nn.Sequential(copy.deepcopy(part), nn.GELU(), part, nn.GELU(), nn.Linear(16, 16))
    second = copy.deepcopy(first)
    kept: dict[nn.Module, list[Tensor]] = {first: [], second: []}
    for net in (first, second):
        for path in ("0", "2"):
            net.get_submodule(path).register_full_backward_hook(
                lambda _, given, got, net=net: kept[net].extend((*given, *got))
            )
    x = torch.randn(8, 16)
    planned = Rockmate(first, x.clone().requires_grad_(), "1MiB", cost="flops")
    assert planned.plan.opaque == ("0", "2")
    for net in (planned, second):
        leaf = x.clone().requires_grad_()
        for _ in range(2):
            net(leaf).square().sum().backward()
    assert len(kept[first]) == len(kept[second]) == 8
    assert all(map(torch.equal, kept[first], kept[second]))


class Skips(nn.Module):
    """Adds what goes into a part to what comes out of it, so gradients meet in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.last = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + self.part(torch.tanh(x))
        return self.last(torch.sigmoid(x))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_gradients_that_come_to_a_hook_are_not_written_to(autocast: bool, before: bool) -> None:
    torch.manual_seed(0)
    first = Skips()
    second = copy.deepcopy(first)
    kept: dict[nn.Module, list[Tensor]] = {first: [], second: []}
    for net in (first, second):
        if before:
            net.part.register_full_backward_pre_hook(lambda _, got, net=net: kept[net].extend(got))
        else:
            net.part.register_full_backward_hook(lambda _, to, got, net=net: kept[net].extend(got))
    x = torch.randn(8, 16)
    planned = Rockmate(first, x, "1MiB", cost="flops")
    for net in (planned, second):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = net(x)
            out.square().sum().backward()
    assert len(kept[first]) == len(kept[second]) == 2
    assert all(map(torch.equal, kept[first], kept[second]))
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


_CALL, _IMPL = nn.Module.__call__, nn.Module._call_impl
DOORS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "its class": lambda net, x: type(net.part).__call__(net.part, x),
    "a name of torch's": lambda net, x: net.part._call_impl(x),
    "another of torch's": lambda net, x: net.part._wrapped_call_impl(x),
    "a function kept": lambda net, x: _CALL(net.part, x),
    "another function kept": lambda net, x: _IMPL(net.part, x),
    "a method kept": lambda net, x: net.kept(x),
}


class ByDoor(Skips):
    """Calls a part otherwise than by `part(x)`."""

    def __init__(self, door: str) -> None:
        super().__init__()
        self.door, self.kept = door, self.part.__call__

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(DOORS[self.door](self, self.first(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("door", DOORS)
def test_hooks_of_a_part_see_gradients_whatever_calls_it(door: str) -> None:
    found = []
    for is_planned in (True, False):
        torch.manual_seed(0)
        model, x = ByDoor(door), torch.randn(8, 16)
        seen = list[Tensor]()
        model.part.register_full_backward_hook(
            lambda _, given, got, seen=seen: seen.extend((*given, *got))
        )
        net = Rockmate(model, x, "1MiB", cost="flops") if is_planned else model
        for _ in range(2):
            net(x).square().sum().backward()
        found.append([*seen, *(p.grad for p in model.parameters())])
    assert len(found[0]) == len(found[1]) == 2 * 2 + 6
    assert all(map(torch.equal, *found))


class Clocked(nn.Module):
    """Cannot be recorded, and has more weights than values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 400), nn.Linear(400, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) * (1 + 0 * time.time())


def test_a_root_that_runs_whole_fits_all_that_it_needs() -> None:
    net, x = Clocked(), torch.randn(2, 8)
    plain, planned = copy.deepcopy(net), Rockmate(net, x, 1.0, cost="flops")
    assert planned.plan.opaque == ("",)
    planned(x).sum().backward()
    plain(x).sum().backward()
    assert_same_gradients(net, plain)
