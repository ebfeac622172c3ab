"""What a step keeps to put back, should a part that runs whole come otherwise, takes no memory."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oracles.training import assert_same_gradients, measured_peak_bytes
from rkgb import OpaquePieceError
from rkgb.engine import trace_memory
from rockmate import InfeasibleBudgetError, Rockmate


class Chooses(nn.Module):
    """Runs whole: it decides by a computed value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x * 0.5 if x.mean() > 100 else x


class Masked(nn.Module):
    """Reads a large buffer, and writes to a small one."""

    mask: Tensor
    count: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.chooses = nn.Linear(width, width), Chooses(width)
        self.register_buffer("mask", torch.zeros(1 << 18))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.chooses(torch.tanh(self.first(x)) + self.mask[: x.shape[-1]])


class Around(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.chooses = nn.Linear(width, width), Chooses(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.chooses(torch.tanh(self.first(x)))


@pytest.mark.parametrize("kind", [Chooses, Around])
@pytest.mark.parametrize("width", [8, 64])  # a generator's state is larger or smaller than a step
def test_the_random_state_that_may_be_put_back_is_not_above_the_budget(
    kind: type[nn.Module], width: int
) -> None:
    model, x = kind(width), torch.randn(16, width)
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(model, x, 100, planner="none", self_test=False)
    least = error.value.minimum_bytes
    planned = Rockmate(model, x, least, planner="none", self_test=False)
    assert measured_peak_bytes(planned, x, grads_exist=True) <= least


def test_only_buffers_that_a_step_writes_to_are_kept_to_be_put_back() -> None:
    x = torch.randn(128, 64)
    planned = Rockmate(Masked(64), x, 1.0, self_test=False)
    assert planned.budget_bytes < 1 << 20  # the bytes of the mask
    for step in range(4):
        trace = trace_memory(lambda _span: planned(x).sum().backward(), torch.device("cpu"))
        made = 0 if step else sum(p.nbytes for p in planned.parameters())
        assert trace.peak_bytes - made <= planned.budget_bytes
    assert planned.count == 4


class Turns(nn.Module):
    """Returns something else in the second step, and writes to a buffer only then, if `late`."""

    seen: Tensor

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.inner, self.late = nn.Linear(8, 8), late
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if x.mean() > 10:
            self.seen.add_(1)
            x = torch.cat([x, x])
        elif not self.late:
            self.seen.add_(1)
        return x


@pytest.mark.parametrize("late", [False, True])
def test_a_buffer_that_cannot_be_put_back_is_named(late: bool) -> None:
    part = Turns(late=late)
    planned = Rockmate(
        nn.Sequential(nn.Linear(8, 8), part), torch.randn(4, 8), 2**20, self_test=False
    )
    other = torch.randn(4, 8)
    with torch.no_grad():
        part.inner.bias.fill_(100)
    if late:
        with pytest.raises(OpaquePieceError) as error:
            planned(other)
        assert any("buffer '1.seen'" in note for note in error.value.__notes__)
    else:
        with pytest.warns(RuntimeWarning, match="runs plain"):
            assert planned(other).shape == (8, 8)
        assert part.seen == 1


class Checkpointed(nn.Module):
    """A layer in a checkpoint, that keeps a random state: more bytes than the rest of its step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return (out * 0.5 if out.mean() > 100 else out).square().mean()


class HasCheckpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(8, 8), Checkpointed()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(torch.tanh(self.first(x)))
        return out * 2


@pytest.mark.parametrize("kind", [Checkpointed, HasCheckpointed])
def test_a_checkpoint_in_what_runs_whole_runs_as_it_was_measured(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 8)
    twin = copy.deepcopy(model)
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(model, x, 100, planner="none", self_test=False)
    budget = error.value.minimum_bytes
    rk = Rockmate(model, x, budget, planner="none", self_test=False)
    assert rk.plan.opaque
    for module in (rk, twin):
        module(x).backward()
    assert_same_gradients(model, twin)
    assert measured_peak_bytes(rk, (x,), grads_exist=True) <= budget
    assert measured_peak_bytes(twin, (x,), grads_exist=True) > budget


class Rotated(nn.Module):
    """The exponential of a matrix: torch holds the more of them the larger its norm is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.turn = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.turn(self.scaled(self.first(x))))

    def scaled(self, x: Tensor) -> Tensor:
        return x * 0.5


class Decides(Rotated):
    """Decides by a value, so that it is planned by its blocks, or runs whole."""

    def scaled(self, x: Tensor) -> Tensor:
        return x / (1 + abs(x.detach().mean().item()))


class RotatedInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Decides(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))


@pytest.mark.parametrize("kind", [Decides, RotatedInside])
def test_kernels_that_take_more_for_larger_values(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 8)
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(model, x, 100, cost="flops")
    least = error.value.minimum_bytes
    planned = Rockmate(model, x, least, cost="flops", self_test=False)
    for scale in (0.001, 1.0, 100.0):

        def step(_span: object = None, scale: float = scale) -> None:
            (planned(x) * scale).sum().backward()

        step()
        scaled_bytes = x.nbytes + 64  # results and gradients of the loss are not the step's
        peak = trace_memory(step, torch.device("cpu")).peak_bytes
        assert peak <= least + scaled_bytes


class Averages(nn.Module):
    """A BatchNorm as textbooks write it: its moving averages are plain attributes."""

    def __init__(self, features: int, kept: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(features))
        self.shift = nn.Parameter(torch.zeros(features))
        self.mean, self.variance, self.kept = torch.zeros(features), torch.ones(features), kept

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        variance = ((x - mean) ** 2).mean(0)
        normal = (x - mean) / torch.sqrt(variance + 1e-5)
        means, variances = 0.9 * self.mean + 0.1 * mean, 0.9 * self.variance + 0.1 * variance
        self.mean = means.detach()
        if self.kept > 1:
            self.variance = variances.data
        return self.gain * normal + self.shift


@pytest.mark.parametrize("kept", [1, 2])
def test_what_a_part_keeps_in_attributes_is_counted_to_the_end(kept: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 24), Averages(24, kept), nn.Sigmoid()]
    layers += [nn.Linear(24, 24), Averages(24, kept), nn.Sigmoid(), nn.Linear(24, 8)]
    model = nn.Sequential(*layers)
    twin = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(6, 8), 1.0, cost="flops")
    assert planned.measured_peak_bytes <= planned.plan.peak_bytes
    for _ in range(3):
        x = torch.randn(6, 8)
        for module in (planned, twin):
            module.zero_grad()
            module(x).square().sum().backward()
        assert_same_gradients(model, twin)
        for own, other in zip(model, twin, strict=True):
            for name in ("mean", "variance") if isinstance(own, Averages) else ():
                assert torch.equal(getattr(own, name), getattr(other, name))


class TwoResults(nn.Module):
    """Runs whole. In its backward, the gradient of the second result is freed before the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(128, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.inner(x.repeat(1, 16))
        if x.mean() > 100:
            x = 2 * x
        scale = x.exp()
        return torch.tanh(x * scale), scale


class UsesOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(8, 8), TwoResults(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.part(self.first(x))[0]))


def test_a_gradient_that_never_comes_makes_no_room() -> None:
    x = torch.randn(64, 8)
    with pytest.raises(InfeasibleBudgetError) as refused:
        Rockmate(UsesOne(), (x,), 1, cost="flops")
    least = refused.value.minimum_bytes
    planned = Rockmate(UsesOne(), (x,), least, cost="flops")
    assert planned.measured_peak_bytes == least


class Hooked(nn.Module):
    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.seen: Tensor | float | None = None

        def hook(_module: nn.Module, given: tuple[Tensor], taken: tuple[Tensor]) -> None:
            found = {"taken": taken[0], "given": given[0]}
            self.seen = found.get(keeps) if keeps else float(taken[0].norm())

        self.layers[2].register_full_backward_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("keeps", ["taken", "given"])
def test_it_is_said_that_a_hook_keeps_gradients(keeps: str) -> None:
    """Planning calls no backward hook, so no plan knows."""
    model, x = Hooked(keeps), torch.randn(64, 8)
    planned = Rockmate(model, (x,), "1MB", cost="flops", self_test=False)
    assert planned.plan.opaque == ("layers.2",)
    with pytest.warns(RuntimeWarning, match=r"'layers.2' \(Linear\) keep 2048 bytes of gradients"):
        planned(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(x).sum().backward()  # it is said once


def test_a_hook_that_only_looks_is_not_told_of() -> None:
    model, x = Hooked(""), torch.randn(64, 8)
    planned = Rockmate(model, (x,), "1MB", cost="flops", self_test=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(x).sum().backward()
    assert model.seen
