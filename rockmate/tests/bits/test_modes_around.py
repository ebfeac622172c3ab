"""Modes of torch around a call: its bits are those of plain PyTorch inside of the same."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rockmate import Rockmate
from rockmate.errors import UnsupportedModuleError


class Net(nn.Module):
    """Some of everything that modes may change."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(torch.sin(self.a(x))) + torch.ones(16))


@pytest.fixture
def pair() -> tuple[Rockmate, Net, Tensor]:
    torch.manual_seed(0)
    module, x = Net(), torch.randn(12, 8)
    plain = copy.deepcopy(module)
    return Rockmate(module, x, "1MiB", cost="flops"), plain, x


def step(module: nn.Module, x: Tensor) -> list[Tensor | None]:
    torch.manual_seed(1)
    module.zero_grad()
    result = module(x)
    result.square().sum().backward()
    return [result.detach(), *(p.grad for p in module.parameters())]


class Doubling(TorchFunctionMode):
    """Gives a function another meaning."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.linear else result


@contextlib.contextmanager
def anomalies() -> Iterator[None]:
    with torch.autograd.set_detect_anomaly(True):
        yield


AROUND: Mapping[str, Callable[[], Any]] = {
    "function mode": Doubling,
    "device": lambda: torch.device("cpu"),
    "forked generators": lambda: torch.random.fork_rng(devices=[]),
    "anomalies": anomalies,
    "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
}


def assert_same_steps(planned: nn.Module, plain: nn.Module, x: Tensor, inside: Any) -> None:
    with inside():
        ours = step(planned, x)
    with inside():
        theirs = step(plain, x)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)  # type: ignore[arg-type]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Hooks on saved tensors")
def test_a_step_inside_is_plain_pytorchs(around: str, pair: tuple[Rockmate, Net, Tensor]) -> None:
    planned, plain, x = pair
    for _ in range(2):
        for inside in (contextlib.nullcontext, AROUND[around]):
            assert_same_steps(planned, plain, x, inside)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_looking_for_anomalies_makes_nothing_run_whole(
    pair: tuple[Rockmate, Net, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    planned, _, x = pair
    with anomalies():
        for _ in range(2):  # the second one is looked at again
            step(planned, x)
        assert planned.plan.opaque == ()
        assert not [record for record in caplog.records if "whole" in record.message]
        for net in pair[:2]:
            with pytest.raises(RuntimeError, match="returned nan values"):
                step(net, x * float("nan"))


@pytest.mark.parametrize("kind", ["linear", "convolution", "opaque"])
def test_what_is_made_here_lies_on_a_device_of_its_own(kind: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 16) if kind != "convolution" else nn.Conv1d(4, 4, 5, padding=2)
    model = nn.Sequential(*(copy.deepcopy(part) for _ in range(3) for part in (layer, nn.GELU())))
    plain, x = copy.deepcopy(model), torch.randn(8, 4, 16)
    torch.set_default_device("meta")  # where a GPU is, users say "cuda"
    try:
        opaque = ("2",) if kind == "opaque" else ()
        planned = Rockmate(model, x, "1MiB", opaque=opaque, cost="flops")
        assert_same_steps(planned, plain, x, contextlib.nullcontext)
    finally:
        torch.set_default_device(None)
    assert_same_steps(planned, plain, x, contextlib.nullcontext)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own
@pytest.mark.parametrize("of", ["input", "parameter"])
def test_tangents_arrive(of: str, pair: tuple[Rockmate, Net, Tensor]) -> None:
    planned, plain, x = pair
    found = []
    for module in (planned, plain):
        torch.manual_seed(1)
        with forward_ad.dual_level():
            given = forward_ad.make_dual(x, x.cos()) if of == "input" else x
            if of == "parameter":
                weight = module.get_parameter("a.weight")
                del module.get_submodule("a")._parameters["weight"]
                module.get_submodule("a").weight = forward_ad.make_dual(weight, weight.cos())  # type: ignore[assignment]
            found.append(forward_ad.unpack_dual(module(given)))
            if of == "parameter":
                del module.get_submodule("a").weight
                module.get_submodule("a").weight = weight  # type: ignore[assignment]
    ours, theirs = found
    assert torch.equal(ours.primal, theirs.primal)
    assert torch.equal(ours.tangent, theirs.tangent)
    for a, b in zip(step(planned, x), step(plain, x), strict=True):
        assert torch.equal(a, b)  # type: ignore[arg-type]


def test_another_default_type_is_another_plan(pair: tuple[Rockmate, Net, Tensor]) -> None:
    planned, plain, x = pair
    step(planned, x)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(RuntimeError, match="dtype"):
            step(plain, x)
        with pytest.raises(RuntimeError, match="dtype"):
            step(planned, x)
    finally:
        torch.set_default_dtype(torch.float32)


class Changing(TorchDispatchMode):
    """Gives operations another meaning: products and sums of products twice theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.ops.aten.addmm.default, torch.ops.aten.mul.Tensor):
            return result
        self.count += 1
        return result * (1 + self.count / 8)


class Looking(Changing):
    """Counts operations."""

    only_watches = True

    def __torch_dispatch__(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return func(*args[1], **(args[2] if len(args) > 2 else {}))


@pytest.mark.filterwarnings("ignore:The mode 'Changing' sees the operations")
@pytest.mark.parametrize("planned_inside", [False, True])
def test_a_mode_that_may_change_operations_sees_the_plain_module(planned_inside: bool) -> None:
    torch.manual_seed(0)
    module, x = Net(), torch.randn(12, 8)
    plain = copy.deepcopy(module)
    with Changing() if planned_inside else contextlib.nullcontext():
        planned = Rockmate(module, x, "1MiB", cost="flops")
    for inside in (Changing, contextlib.nullcontext, Changing):
        assert_same_steps(planned, plain, x, inside)


def test_such_a_mode_is_named(pair: tuple[Rockmate, Net, Tensor]) -> None:
    planned, _, x = pair
    with pytest.warns(RuntimeWarning, match="The mode 'Changing' sees the operations"), Changing():
        planned(x)
    result = planned(x)
    with pytest.raises(UnsupportedModuleError, match="inside of the mode 'Changing'"), Changing():
        result.sum().backward()


def test_a_mode_that_only_looks_sees_the_planned_step(pair: tuple[Rockmate, Net, Tensor]) -> None:
    planned, plain, x = pair
    with Looking() as seen:
        ours = step(planned, x)
    assert seen.count > 0
    for a, b in zip(ours, step(plain, x), strict=True):
        assert torch.equal(a, b)  # type: ignore[arg-type]
