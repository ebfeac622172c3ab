"""Submodules that cannot be recorded run whole: bits, bytes, state, and what is said of them."""

from __future__ import annotations

import copy
import gc
import random
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rkgb import DataDependentError, OpaquePieceError
from rkgb.engine import trace_memory
from rockmate import Rockmate


class Branching(nn.Module):
    """Takes one way or another by a value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            return self.down(torch.relu(self.up(x))) * 2
        return self.down(torch.tanh(self.up(x)))


class Routed(nn.Module):
    """Experts that get as many rows as are routed to them, possibly none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero(as_tuple=True)
            if rows[0].numel():
                out[rows] = expert(x[rows]) * weight[rows][:, None]
        return out


class Drawing(nn.Module):
    """Draws from three sources of random numbers."""

    def __init__(self, _width: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.5:
            return x * float(np.random.rand())
        return torch.dropout(x, 0.3, True)


class Momentless(nn.Sequential):
    """A BatchNorm whose factor is a Python number read from a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.BatchNorm1d(width, momentum=None))


class Doubling(torch.autograd.Function):
    """Computes in numpy, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.from_numpy(grad.numpy() * 2)


class Foreign(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(Doubling.apply(x).tanh())


class Block(nn.Module):
    """Uses its inner module twice, and its input beside it."""

    def __init__(self, width: int, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), inner
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inner(x) + self.inner(self.norm(x)) * 0.5
        return x + self.linear(torch.relu(x))


class Stack(nn.Module):
    def __init__(self, make: Callable[[int], nn.Module], width: int = 24, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, make(width)) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Filling(nn.Module):
    """Fills memory behind torch's back, as kernels of other libraries do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.width = nn.Linear(width, width), width

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.empty(self.width)
        scale.numpy()[:] = np.arange(self.width) / self.width
        return self.linear(x * scale)


KINDS: tuple[Callable[[int], nn.Module], ...] = (
    *(Branching, Routed, Drawing, Momentless, Foreign, Filling),
)


# Their activations are in the pieces, where no plan can drop them.
LEAST: dict[Any, float | str] = {Drawing: "100KB", Foreign: 0.95, Filling: 0.95}


def train(model: nn.Module, sample: Tensor) -> list[Any]:
    """Return every bit of four steps whose inputs take other ways through the model."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    seen: list[Any] = []
    for turn in range(4):
        optimizer.zero_grad()
        result = model(sample * (1 - turn) + 0.1 * turn)
        (result.square().mean() * 0.01).backward()
        seen.append(result.detach().clone())
        seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        seen += [b.clone() for b in model.buffers()]
        seen += [torch.get_rng_state(), random.random(), float(np.random.rand())]
        optimizer.step()
    return seen


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize(
    ("make", "budget"),
    [
        pytest.param(
            *(make, budget),
            marks=[pytest.mark.nightly] * ((i + j) % 2),
            id=f"{make.__name__}-{budget}",
        )
        for i, make in enumerate(KINDS)
        for j, budget in enumerate((0.75, 1.0))
    ],
)
def test_pieces_train_bit_for_bit_within_the_budget(
    make: Callable[[int], nn.Module], budget: float
) -> None:
    torch.manual_seed(0)
    model, sample = Stack(make), torch.randn(40, 24)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # other ways hold more than the sample's
        least = LEAST.get(make)
        wrapped = Rockmate(model, sample, least or budget)
    # A Function in numpy is one operation, and no submodule runs whole for it.
    assert bool(wrapped.plan.opaque) == (make is not Foreign), "the pieces are named in the plan"
    assert wrapped.measured_peak_bytes is not None
    assert wrapped.measured_peak_bytes <= wrapped.budget_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # other ways hold more than the sample's
        found = train(wrapped, sample)
    expected = train(twin, sample)
    assert len(found) == len(expected)
    assert all(map(equal, found, expected))


def test_only_the_smallest_submodules_run_whole() -> None:
    model = Stack(Momentless)
    plan = Rockmate(model, torch.randn(8, 24), 1.0).plan
    assert plan.opaque == tuple(f"blocks.{i}.inner.1" for i in range(3))
    assert "blocks.0.inner.1" in str(plan)


def test_strict_refuses_and_opaque_names() -> None:
    sample = torch.randn(8, 24)
    with pytest.raises(DataDependentError, match=r"blocks\.0\.inner"):
        Rockmate(Stack(Branching), sample, 1.0, strict=True)
    wrapped = Rockmate(Stack(nn.Identity), sample, 1.0, opaque=["blocks.1"])  # type: ignore[arg-type]
    assert wrapped.plan.opaque == ("blocks.1",)


def test_a_recomputation_that_goes_another_way_is_an_error() -> None:
    interval = sys.getswitchinterval()  # nothing that a second run finds as it was

    class Clocked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(x)
            return torch.sigmoid(y) if x.mean().item() > 100 or sys.getswitchinterval() > 1 else y

    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), Clocked())]
    model, sample = nn.Sequential(*layers, nn.Linear(16, 16)), torch.randn(4096, 16)
    wrapped = Rockmate(model, sample, 0.6)
    assert "run_Clocked_again" in wrapped.plan.source()
    result = wrapped(sample).sum()
    try:
        sys.setswitchinterval(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with pytest.raises(OpaquePieceError, match="another way"):
                result.backward()
    finally:
        sys.setswitchinterval(interval)


def test_a_result_of_another_structure_is_a_plain_step_and_said() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

        def forward(self, x: Tensor) -> list[Tensor]:
            y = self.norm(self.linear(x))
            return [y, y * 2] if random.random() < 0.5 else [y]

    class Summing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = Skipping(), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(sum(self.inner(x)))  # type: ignore[arg-type]

    torch.manual_seed(0)
    random.seed(0)
    model, sample = Summing(), torch.randn(8, 16)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        wrapped = Rockmate(model, sample, "1MiB", self_test=False)
        found = train(wrapped, sample) + train(wrapped, sample)
    expected = train(twin, sample) + train(twin, sample)
    assert all(map(equal, found, expected))


def test_a_piece_that_holds_more_than_planned_says_so_once() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            for _ in range(int(x.abs().max())):
                y = torch.tanh(y * 1.5)
            return y

    model = nn.Sequential(nn.Linear(16, 16), Growing(), nn.Linear(16, 16))
    sample = torch.rand(64, 16)
    wrapped = Rockmate(model, sample, "8MiB")
    with torch.no_grad():
        model[0].weight.mul_(30.0)
    with pytest.warns(RuntimeWarning, match=r"holds \d+ bytes .* \d+ were planned"):
        wrapped(sample).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(sample).sum().backward()


def test_a_forward_without_a_backward_leaves_nothing_behind() -> None:
    model, sample = Stack(Branching), torch.randn(64, 24)
    wrapped = Rockmate(model, sample, 1.0)
    gc.collect()
    gc.disable()
    try:
        trace = trace_memory(lambda _span: wrapped(sample).sum().item(), torch.device("cpu"))
    finally:
        gc.enable()
    assert trace.end_bytes == 0


def test_the_hooks_of_parameters_are_called_once_a_step() -> None:
    model, sample = Stack(Branching, depth=1), torch.randn(8, 24)
    wrapped = Rockmate(model, sample, 1.0)
    seen: list[float] = []
    weight = model.blocks[0].inner.down.bias  # type: ignore[union-attr]
    weight.register_hook(lambda grad: seen.append(float(grad.sum())))  # type: ignore[operator]
    wrapped(sample).sum().backward()
    assert len(seen) == 1
    assert seen[0] == float(weight.grad.sum())  # type: ignore[union-attr]


def test_a_dropped_module_goes() -> None:
    model, sample = Stack(Branching, depth=1), torch.randn(8, 24)
    wrapped = Rockmate(model, sample, 1.0)
    wrapped(sample).sum().backward()
    alive = weakref.ref(model.blocks[0])
    del wrapped, model
    gc.collect()
    assert alive() is None


class Looking(nn.Module):
    """Throws a graph away, and then goes one way or another by a value."""

    def __init__(self, width: int, depth: int, *, looks_back: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.looks_back = looks_back

    def forward(self, x: Tensor) -> Tensor:
        large = self.layers[0](x)
        if self.looks_back:  # holds more than what follows
            for _ in range(12):
                large = torch.tanh(large)
        if large.mean().item() > 10:
            x = x * 2
        del large
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x + self.layers[0](x)  # whose gradient autograd adds to the one that came in


@pytest.mark.parametrize("looks_back", [False, True], ids=["straight", "throwing away"])
def test_a_module_that_runs_whole_trains_within_its_plain_peak(looks_back: bool) -> None:
    torch.manual_seed(0)
    model = Looking(16, 4, looks_back=looks_back)
    sample = torch.randn(256, 16)
    rk = Rockmate(copy.deepcopy(model), sample, 1.0)
    assert rk.plan.opaque == ("",)
    assert rk.measured_peak_bytes is not None
    assert rk.measured_peak_bytes <= rk.budget_bytes == rk.eager_peak_bytes
    found, expected = train(rk, sample), train(model, sample)
    assert len(found) == len(expected)
    assert all(map(equal, found, expected))


class Dropping(nn.Module):
    """Leaves one of its layers out, by a value that follows from its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        side = self.left if x.mean().item() > 0 else self.right
        return torch.tanh(side(x)) * x.sum().item()


def test_layers_that_the_sample_left_out_take_no_room_beside_the_whole_module() -> None:
    torch.manual_seed(0)
    model, sample = Dropping(), torch.randn(256, 64)
    rk = Rockmate(copy.deepcopy(model), sample, 1.0)
    assert rk.plan.opaque == ("",)
    assert rk.plan.peak_bytes <= rk.budget_bytes == rk.eager_peak_bytes
    for x in (sample, -sample, sample):  # the other way, and back
        rk.zero_grad(), model.zero_grad()
        rk(x).sum().backward()
        model(x).sum().backward()
        for mine, its in zip(rk.parameters(), model.parameters(), strict=True):
            assert equal(mine.grad, its.grad)


class _Again(torch.autograd.Function):
    """Runs a module again in its backward, which calls autograd and adds to `.grad` itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: nn.Module) -> Tensor:
        ctx.inner, ctx.x = inner, x.detach()  # which autograd does not see
        return x + inner(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            torch.autograd.backward(ctx.inner(x), grads[0])
        return grads[0] + x.grad, None


class RunningAgain(nn.Module):
    """A block as packages for reversible networks have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.inner = nn.Sequential(wide, nn.Tanh(), narrow)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Again.apply(x, self.inner)  # type: ignore[no-untyped-call]
        return result


def test_a_backward_that_calls_autograd_trains_within_the_plain_peak() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), RunningAgain(16), nn.Linear(16, 16))
    sample = torch.randn(64, 16)
    rk = Rockmate(copy.deepcopy(model), sample, 1.0)
    assert rk.plan.opaque == ("2",)
    # What `ctx` holds is foreseen; the gradients that it adds to are no memory of the step.
    assert rk.measured_peak_bytes == rk.plan.peak_bytes
    assert rk.plan.peak_bytes <= rk.budget_bytes == rk.eager_peak_bytes
    found, expected = train(rk, sample), train(model, sample)
    assert len(found) == len(expected)
    assert all(map(equal, found, expected))


class Passing(nn.Module):
    """Gives its gradient on as it comes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x) if x.sum().item() < 1e9 else -x


def test_a_gradient_that_others_hold_is_not_written_to() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Passing())
    sample = torch.randn(4, 8)
    rk = Rockmate(copy.deepcopy(model), sample, "100KB")
    assert rk.plan.opaque == ("2",)
    gradient = torch.randn(4, 8)
    before = gradient.clone()
    rk(sample).backward(gradient)
    model(sample).backward(before)
    assert torch.equal(gradient, before)
    for mine, its in zip(rk.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.equal(mine.grad, its.grad)
