"""Hooks on saved tensors around a planned module: checkpoints, and saving on the CPU."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oracles.training import assert_same_gradients
from rkgb.engine import trace_memory
from rockmate import ChangedTensorError, Rockmate
from rockmate.problems.link import Link
from runs.moves import SlowHost
from runs.places import let_host_be
from runs.planned import wrap


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 48),
        nn.BatchNorm1d(48),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(48, 48),
        nn.GELU(),
        nn.Linear(48, 24),
    )


class Looks(nn.Module):
    """Runs whole: it branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(24, 24), nn.Linear(24, 24)
        self.norm = nn.BatchNorm1d(24)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.inner(x)))
        if h.mean() > 5:
            h = h * 2
        made: Tensor = self.last(h)
        return made


def _checkpoint(f: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = checkpoint(f, x, use_reentrant=False)
    return made


def _reentrant(f: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = checkpoint(f, x, use_reentrant=True)
    return made


def _on_cpu(f: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        made: Tensor = f(x)
    return made


def _in_double(f: nn.Module, x: Tensor) -> Tensor:
    """Pack into something that is no tensor, by hooks of one's own: the step runs plain."""
    with (
        warnings.catch_warnings(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: [t.clone()], lambda packed: packed[0]),
    ):
        warnings.filterwarnings("ignore", message="Hooks on saved tensors may change their values")
        made: Tensor = f(x)
    return made


AROUND: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "checkpoint": _checkpoint,
    "reentrant checkpoint": _reentrant,
    "saved on the CPU": _on_cpu,
    "packed": _in_double,
}


def _same_buffers(one: nn.Module, two: nn.Module) -> bool:
    pairs = zip(one.buffers(), two.buffers(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("budget", [1.0, 0.7])
@pytest.mark.parametrize("around", AROUND)
def test_hooks_around_a_planned_module_leave_plain_bits(around: str, budget: float) -> None:
    model = _model()
    twin = copy.deepcopy(model)
    wrapped = wrap(model, torch.randn(32, 24), budget)
    for step in range(3):  # the first of them plans: its input has a gradient
        found: list[Tensor | None] = []
        x = torch.randn(32, 24)
        for module in (wrapped, twin):
            torch.manual_seed(step)
            module.zero_grad()
            own = x.clone().requires_grad_()
            AROUND[around](module, own).square().mean().backward()
            found.append(own.grad)
        assert_same_gradients(model, twin)
        assert found[0] is not None
        assert found[1] is not None
        assert torch.equal(found[0], found[1])
        # Statistics of a checkpoint's forward that runs again are counted again.
        assert _same_buffers(model, twin)


@pytest.mark.parametrize("around", ["checkpoint", "saved on the CPU"])
def test_hooks_get_no_tensor_whose_memory_has_moved(
    around: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_host_be(SlowHost(random.Random(0)), Link(1e9, 1e9), monkeypatch)
    model, x = nn.Sequential(*(_model() for _ in range(3))), torch.randn(256, 24)
    twin = copy.deepcopy(model)
    rk = Rockmate(model, x, 0.4, offload="host", planner="segments")
    assert rk.plan.plan.moves
    for hooked in (True, False, True):
        run = AROUND[around] if hooked else nn.Module.__call__
        told = pytest.warns(RuntimeWarning, match="moves storages elsewhere")
        for module in (rk, twin):
            torch.manual_seed(1)
            with told if hooked and module is rk else contextlib.nullcontext():
                run(module, x).square().mean().backward()
        assert_same_gradients(rk, twin)


@pytest.mark.parametrize("budget", [1.0, 0.7])
def test_hooks_that_change_values_change_what_they_do_in_plain(budget: float) -> None:
    model, x = _model(), torch.randn(32, 24)
    twin = copy.deepcopy(model)
    wrapped = wrap(model, x, budget)
    rough = torch.autograd.graph.saved_tensors_hooks(
        lambda t: (t.dtype, t.to(torch.bfloat16)), lambda packed: packed[1].to(packed[0])
    )
    for module in (wrapped, twin):
        warned = pytest.warns(RuntimeWarning, match="compression")
        with warned if module is wrapped else contextlib.nullcontext(), rough:
            torch.manual_seed(0)
            module(x).square().mean().backward()
    assert_same_gradients(model, twin)
    exact = copy.deepcopy(twin)
    exact.zero_grad()
    torch.manual_seed(0)
    exact(x).square().mean().backward()
    assert not torch.equal(exact[0].weight.grad, twin[0].weight.grad)


class Scales(nn.Module):
    """A part whose weight's gradient reads its input, which a running value has scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(1)), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x * self.scale + self.scale)
        return made


def _assert_trains_alike(
    wrapped: nn.Module,
    model: nn.Module,
    twin: nn.Module,
    run: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    """Run steps with new inputs; gradients and buffers are those of the plain twin after each."""
    for _ in range(3):
        x = torch.randn(32, 24)
        for module in (wrapped, twin):
            module.zero_grad()
            run(module, x.clone().requires_grad_()).square().mean().backward()
        assert_same_gradients(model, twin)
        assert _same_buffers(model, twin)


class RunningRoot(nn.Module):
    """A root that decides by values, and scales by a running value between its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*[nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(3)])
        self.second = Scales()
        self.register_buffer("running", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x * 0.5 if x.mean() > 100 else x
        self.running.mul_(0.9).add_(0.1 * x.detach().abs().mean())
        x = x * self.running.clone()
        return x + self.second(x)


@pytest.mark.parametrize(
    ("around", "budget"),
    [
        pytest.param(around, budget, marks=[pytest.mark.nightly] * ((i + j) % 2))
        for i, around in enumerate(AROUND)
        for j, budget in enumerate((0.9, 0.8))
    ],
)
def test_blocks_get_the_inputs_of_a_checkpoints_second_run(around: str, budget: float) -> None:
    torch.manual_seed(0)
    model = RunningRoot()
    twin = copy.deepcopy(model)
    wrapped = wrap(model, torch.randn(32, 24), budget)
    _assert_trains_alike(wrapped, model, twin, AROUND[around])


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("part", ["a submodule", "the module"])
def test_what_runs_whole_is_exact_inside_them(part: str, around: str) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(24, 24), Looks(), nn.Linear(24, 24)
    model = nn.Sequential(*layers) if part == "a submodule" else layers[1]
    twin = copy.deepcopy(model)
    wrapped = wrap(model, torch.randn(32, 24), "1MiB")
    _assert_trains_alike(wrapped, model, twin, AROUND[around])


@pytest.mark.parametrize("around", [_checkpoint, _reentrant])
@pytest.mark.parametrize("calls", [1, 2])
def test_what_runs_whole_is_as_a_checkpoints_second_run_makes_it(
    around: Callable[[nn.Module, Tensor], Tensor], calls: int
) -> None:
    torch.manual_seed(0)
    first = torch.nn.utils.spectral_norm(nn.Linear(24, 24))  # another weight at each run
    looks = Looks()
    model = nn.Sequential(first, *[looks] * calls, nn.Linear(24, 24))
    twin = copy.deepcopy(model)
    wrapped = wrap(model, torch.randn(32, 24), "1MiB", self_test=False)
    assert set(wrapped.plan.opaque) == {"1"}
    _assert_trains_alike(wrapped, model, twin, around)


class Counts(nn.Module):
    """Sets a buffer and an attribute before the last tensor is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(24, 24), None
        self.register_buffer("mean", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        self.last = x.detach() + self.mean  # type: ignore[assignment]
        return x * self.mean


@pytest.mark.parametrize("around", AROUND)
def test_what_a_forward_sets_is_set_by_the_run_of_a_checkpoint(around: str) -> None:
    torch.manual_seed(0)
    model = Counts()
    twin = copy.deepcopy(model)
    wrapped = wrap(model, torch.randn(8, 24), "1MiB")
    for _ in range(3):
        x = torch.randn(8, 24)
        for module in (wrapped, twin):
            module.zero_grad()
            AROUND[around](module, x.clone().requires_grad_()).square().mean().backward()
        assert_same_gradients(model, twin)
        assert _same_buffers(model, twin)
        assert torch.equal(model.last, twin.last)


def test_a_checkpoint_lets_go_of_what_a_planned_step_has_saved() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])
    x = torch.randn(128, 64, requires_grad=True)
    wrapped = wrap(model, x.detach(), 1.0)
    for _ in range(2):  # the first plans
        _checkpoint(wrapped, x).sum().backward()

    def held(run: Callable[[nn.Module, Tensor], Tensor]) -> int:
        made: list[Any] = []

        def forward(span: Any) -> None:
            with span("forward"):
                made.append(run(wrapped, x))

        found = trace_memory(forward, torch.device("cpu")).spans[0]
        made[0].sum().backward()
        return found.end_bytes - found.start_bytes

    output, random_state = 128 * 64 * 4, 5056  # of which the checkpoint keeps one
    assert held(_checkpoint) <= output + random_state
    assert held(lambda f, x: f(x)) >= 4 * output


def test_a_second_backward_through_a_checkpoint_runs_the_forward_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))
    twin = copy.deepcopy(model)
    wrapped = wrap(model, torch.randn(8, 24), 1.0)
    x = torch.randn(8, 24, requires_grad=True)
    for module in (wrapped, twin):
        loss = _checkpoint(module, x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(model, twin)


class Around(nn.Module):
    """Gives a planned part other inputs at each run, and other random numbers to a dropout."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.register_buffer("runs", torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        self.runs.add_(1)
        return self.part(x * self.runs.clone())


class Hidden(nn.Module):
    """Returns a hidden state beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = _model(), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.inner(x)
        return self.last(torch.tanh(h)), h


class Renews(nn.Module):
    """Replaces a buffer after its backward is to read it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.by = _model(), 1.5
        self.register_buffer("mean", torch.full((24,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x) * self.mean) * self.by
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return torch.exp(y)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "as planned": lambda y: y.square().mean(),
    "a sum": lambda y: y.sum(),
    "another layout": lambda y: y.t().contiguous().square().sum(),
}


@pytest.mark.parametrize(("loss", "many"), [("as planned", 1), ("a sum", 2), ("another layout", 1)])
@pytest.mark.parametrize("part", [_model, Hidden, Renews])
def test_gradients_of_a_new_kind_meet_what_a_checkpoints_second_run_has_saved(
    part: Callable[[], nn.Module], loss: str, many: int
) -> None:
    """Not what the part computes when it runs again from the first run's inputs."""
    torch.manual_seed(0)
    inside = part()
    twin = Around(copy.deepcopy(inside))
    model = Around(wrap(inside, torch.randn(96, 24), 0.8))
    for step in range(3):
        x = torch.randn(96, 24)
        for module in (model, twin):
            torch.manual_seed(step)
            module.zero_grad()
            made = checkpoint(module, x, use_reentrant=False, preserve_rng_state=False)
            value = LOSSES[loss](made if isinstance(made, Tensor) else made[0])
            for left in reversed(range(many)):
                value.backward(retain_graph=left > 0)
        assert_same_gradients(inside, twin.part)
        assert _same_buffers(inside, twin.part)


def test_a_checkpoint_runs_no_other_plan_for_the_backward() -> None:
    torch.manual_seed(0)
    inside = Renews()
    wrapped = wrap(inside, torch.randn(96, 24), 0.8)
    x = torch.randn(96, 24)
    for by in (2.5, 1.5):  # each of them has its plan from now on
        inside.by = by
        checkpoint(wrapped, x, use_reentrant=False).sum().backward()
    loss = checkpoint(wrapped, x, use_reentrant=False).sum()
    inside.by = 2.5
    with pytest.raises(ChangedTensorError, match="has run Renews again for the backward"):
        loss.backward()
    checkpoint(wrapped, x, use_reentrant=False).sum().backward()
