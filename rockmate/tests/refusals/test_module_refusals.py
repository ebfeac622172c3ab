"""What the wrapper refuses, when it plans and when it is called, and what it says."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rkgb
from oracles.training import assert_same_gradients, eager_copy
from rockmate import (
    ArgumentsError,
    BackwardTwiceError,
    BudgetFormatError,
    ChangedTensorError,
    DoubleBackwardError,
    InfeasibleBudgetError,
    SelfTestError,
    UnsupportedModuleError,
)
from runs.planned import wrap
from zoo.nets import network


def still_trains(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """After a refusal the module must work as if nothing had been tried."""
    result = model(*args, **kwargs)
    (result.square().mean() if isinstance(result, Tensor) else result).backward()
    assert any(p.grad is not None for p in model.parameters())


# ---------------------------------------------------------------------- refusals at planning


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # the line that the message must name
            return y * 2
        return y


class Printing(DataDependent):
    def forward(self, x: Tensor) -> Tensor:
        print("shape", x.shape)
        return self.linear(x)


class Raising(DataDependent):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not today")


class Counting(DataDependent):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


class Logging(DataDependent):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(1.0)
        return self.linear(x) * len(self.log)


class Hidden(DataDependent):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(4, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@pytest.mark.parametrize(
    ("cls", "error", "text"),
    [
        (
            DataDependent,
            rkgb.DataDependentError,
            r"test_module_refusals\.py:\d+ \(if y.sum.*\n.* control flow",
        ),
        (Printing, rkgb.SideEffectError, "its forward prints or logs"),
        (
            Raising,
            rkgb.TraceError,
            r"test_module_refusals\.py:\d+ .*\n.*raised ValueError: not today",
        ),
        (Counting, rkgb.SideEffectError, r"keep the attribute 'calls' .*\n.*changes it"),
        (Logging, rkgb.SideEffectError, r"changes what attribute 'log' leads to \(list\)"),
        (Hidden, rkgb.UnsupportedOpError, "make 'scale' an nn.Parameter"),
    ],
)
def test_modules_that_cannot_be_exact_are_refused(
    cls: type[nn.Module], error: type[Exception], text: str
) -> None:
    model = cls()
    x = torch.randn(6, 4)
    before = x.clone()
    with pytest.raises(error, match=text):
        wrap(model, x, "1MiB", strict=True)
    assert torch.equal(x, before), "planning must not change the sample"
    if cls is not Raising:
        still_trains(model, x)


def test_nothing_to_differentiate_is_refused() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(UnsupportedModuleError, match="requires a gradient"):
        wrap(model, torch.randn(2, 4), "1MiB")


def test_eval_mode_is_refused() -> None:
    with pytest.raises(UnsupportedModuleError, match=r"eval mode"):
        wrap(nn.Linear(4, 4).eval(), torch.randn(2, 4), "1MiB")


def test_different_devices_are_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(rkgb.TraceError, match=r"one device.*cpu.*meta"):
        wrap(model, torch.randn(2, 4, device="meta"), "1MiB")
    still_trains(model, torch.randn(2, 4))


_counter = ctypes.c_int(0)
_address = ctypes.addressof(_counter)


class Unrepeatable(DataDependent):
    """Differs between two runs in a way that nothing of Python's shows: by an address alone."""

    def forward(self, x: Tensor) -> Tensor:
        counter = ctypes.c_int.from_address(_address)
        counter.value += 1
        return self.linear(x) * counter.value


def test_the_self_test_catches_what_the_capture_cannot_see() -> None:
    model, x = Unrepeatable(), torch.randn(2, 4)
    with pytest.raises(SelfTestError, match="output 0"):
        wrap(model, x, "1MiB")
    assert wrap(model, x, "1MiB", self_test=False) is not None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (0, "not positive"),
        (-5, "not positive"),
        (0.0, "not positive"),
        (1.5, "float above 1"),
        ("much", "cannot be read"),
        ("3 parsec", "unknown unit 'parsec'"),
        ("", "cannot be read"),
        ("140%", "not in"),
        ("24", "could mean 24 bytes or 24 GB"),
        (True, "bool"),
        (float("nan"), "not positive"),
    ],
)
def test_unreadable_budgets_are_refused(given: Any, text: str) -> None:
    model, sample = network("tied")
    with pytest.raises(BudgetFormatError, match=text):
        wrap(model, sample, given)
    still_trains(model, *sample)


def test_no_budget_is_refused_with_what_to_give() -> None:
    model, sample = network("tied")
    with pytest.raises(ArgumentsError, match="needs a budget"):
        wrap(model, sample, None)
    still_trains(model, *sample)


def test_an_infeasible_budget_names_the_smallest_feasible_one() -> None:
    model, sample = network("gpt")
    with pytest.raises(InfeasibleBudgetError) as refusal:
        wrap(model, sample, 1000)
    assert refusal.value.asked_bytes == 1000
    assert str(refusal.value.minimum_bytes) in str(refusal.value)
    still_trains(model, *sample)


# ---------------------------------------------------------------------- refusals at a call


class Single:
    def __deepcopy__(self, _memo: Any) -> Any:
        raise TypeError("there is only one")


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    model.log = Single()  # type: ignore[assignment]
    with pytest.raises(rkgb.TraceError, match=r"Linear cannot be deep-copied, .*'log'"):
        wrap(model, x, "1MiB")
    still_trains(model, x)


class FromC:
    """As libraries that cffi has loaded."""

    def __getattribute__(self, name: str) -> Any:
        raise AttributeError(name)


def test_an_attribute_without_a_class_is_named() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    model.library = FromC()  # type: ignore[assignment]
    with pytest.raises(rkgb.TraceError, match=r"Linear cannot be deep-copied, .*'library'"):
        wrap(model, x, "1MiB")


class Keeper(nn.Module):
    """Has what is read or written once, and may use it."""

    def __init__(self, kept: Any, *, uses: bool) -> None:
        super().__init__()
        self.linear, self.kept, self.uses = nn.Linear(4, 4), kept, uses

    def forward(self, x: Tensor) -> Tensor:
        if self.uses:
            x = x * next(self.kept)
        return torch.relu(self.linear(x))


@pytest.mark.parametrize("kind", ["file", "generator"])
def test_open_files_and_generators_are_refused_where_a_forward_uses_them(
    kind: str, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("w+") as file:
        kept = file if kind == "file" else (i for i in range(9))
        model, x = nn.Sequential(Keeper(kept, uses=True)), torch.randn(2, 4)
        with pytest.raises(rkgb.SideEffectError, match="attribute 'kept' of module '0', an open"):
            wrap(model, x, "1MiB")
        assert kind == "file" or next(kept) == 0, "nothing was taken from it"
        model[0].uses = False
        rk, twin = wrap(model, x, "1MiB"), nn.Linear(4, 4)
        twin.load_state_dict(model[0].linear.state_dict())
        rk(x).sum().backward()
        torch.relu(twin(x)).sum().backward()
        for ours, plain in zip(rk.parameters(), twin.parameters(), strict=True):
            assert ours.grad is not None
            assert plain.grad is not None
            assert torch.equal(ours.grad, plain.grad)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(UnsupportedModuleError, match="function"):
        wrap(lambda x: x, torch.randn(3, 4), "1MiB")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("path", ["(root)", "1"])
def test_modules_made_by_torch_jit_are_refused(path: str) -> None:
    traced = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4))
    model = traced if path == "(root)" else nn.Sequential(nn.Linear(4, 4), traced)
    with pytest.raises(UnsupportedModuleError, match=r"made by torch\.jit") as caught:
        wrap(model, torch.randn(3, 4), "1MiB")
    assert path in str(caught.value)


def test_a_call_that_the_model_itself_refuses() -> None:
    wrapped = wrap(nn.Linear(4, 4), torch.randn(3, 4), "1MiB")
    with pytest.raises(RuntimeError, match="dtype"):  # as without us
        wrapped(torch.randn(3, 4, dtype=torch.float64))
    wrapped(torch.randn(3, 4)).sum().backward()


def test_backward_twice_is_refused() -> None:
    model, sample = network("tied")
    twin = eager_copy(model)
    wrapped = wrap(model, sample, "1MiB")
    loss = wrapped(*sample)
    loss.backward()
    with pytest.raises(BackwardTwiceError, match="second time"):
        loss.backward()
    twin(*sample).backward()
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_double_backward_is_refused() -> None:
    model, sample = network("tied")
    wrapped = wrap(model, sample, "1MiB")
    with pytest.raises(DoubleBackwardError, match="create_graph"):
        torch.autograd.grad(wrapped(*sample), list(model.parameters()), create_graph=True)


def test_parameters_changed_before_backward_are_refused() -> None:
    model, sample = network("tied")
    wrapped = wrap(model, sample, "1MiB")
    loss = wrapped(*sample)
    with torch.no_grad():
        model.first.weight.mul_(2)
    with pytest.raises(ChangedTensorError, match="changed in place"):
        loss.backward()


def test_an_output_changed_before_backward_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), torch.randn(3, 4)
    wrapped = wrap(model, x, "1MiB")
    y = wrapped(x)
    loss = y.sum()
    y.detach().zero_()
    with pytest.raises(ChangedTensorError, match="output"):
        loss.backward()


@pytest.mark.slow
def test_an_exception_in_backward_leaves_a_module_that_works() -> None:
    model, sample = network("gpt")
    twin = eager_copy(model)
    wrapped = wrap(model, sample, 0.6)

    def explode(_grad: Tensor) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[1].ln1.weight.register_hook(explode)
    with pytest.raises(KeyboardInterrupt):
        wrapped(*sample).backward()
    handle.remove()
    model.zero_grad()
    state = torch.get_rng_state()
    wrapped(*sample).backward()
    torch.set_rng_state(state)
    twin(*sample).backward()
    assert_same_gradients(model, twin)
