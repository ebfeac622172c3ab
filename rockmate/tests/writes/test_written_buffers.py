"""Buffers that the forward writes and reads: what runs again reads what the forward has seen."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rockmate import InfeasibleBudgetError, Rockmate
from rockmate.errors import ChangedTensorError

W = 16
Between = Callable[[nn.Module, Tensor], None]


class Sandwich(nn.Module):
    """Layers around what reads a buffer, so that there is something to recompute."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(W, W), middle, nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return y


class Keeps(nn.Module):
    """A module with a buffer `b`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)
        self.register_buffer("b", torch.linspace(0.5, 1.5, W))
        self.register_buffer("table", torch.linspace(0.5, 1.5, 2 * W).reshape(2, W))


class RunningMean(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.linear(x - self.b))
        with torch.no_grad():
            self.b.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return torch.tanh(y - self.b) * y


class WrittenByOut(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        mean = torch.mean(x.detach(), 0, out=self.b)
        return torch.tanh(self.linear(torch.tanh(x - mean)) + mean)


class ViewOfBuffer(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        row = self.table[1]
        y = torch.sigmoid(x + row) * torch.sigmoid(x - row)
        with torch.no_grad():
            row.add_(x.mean(0))
        return torch.tanh(self.linear(y) + self.table[1]) + row


class InPlaceThenUsed(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.add_(x.abs().mean())
        y = torch.sigmoid(x + self.b)
        return torch.tanh(self.linear(y - self.b)) * self.b.clone()


class SeveralPlaces(Keeps):
    """Reads written memory in places that lie in one another, in one operation."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.table[0].add_(x.mean(0))
        y = torch.sigmoid(x + self.table[0])
        return y + torch.cat([self.table, self.table[:1].expand(2, W)]).sum(0)


class Codebook(Keeps):
    """A vector quantizer, whose codes follow what is put into them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, W))
        self.register_buffer("counts", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.linear(x)
        apart = flat.detach().pow(2).sum(1, True) - 2 * flat.detach() @ self.codes.t()
        chosen = nn.functional.one_hot((apart + self.codes.pow(2).sum(1)).argmin(1), 4).float()
        found = chosen @ self.codes
        with torch.no_grad():
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes.mul_(0.9).add_(chosen.t() @ flat / self.counts[:, None], alpha=0.1)
        return flat + (found - flat).detach() + torch.tanh(flat - found)


def _spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(W, W))


def _spectral_old() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(W, W))


QUICK = (RunningMean, WrittenByOut, ViewOfBuffer, InPlaceThenUsed, SeveralPlaces)
MIDDLES = (
    *QUICK,
    *(pytest.param(m, marks=pytest.mark.slow) for m in (_spectral, _spectral_old, Codebook)),
)


def _forward_without_gradients(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(3 * x)


def _load(model: nn.Module, _: Tensor) -> None:
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.copy_(torch.ones_like(buffer) / buffer.numel())


def _set(model: nn.Module, _: Tensor) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            assert buffer is not None
            module._buffers[name] = torch.full_like(buffer, 1 / buffer.numel())


def _nothing(_model: nn.Module, _x: Tensor) -> None:
    pass


BETWEEN: tuple[Between, ...] = (_nothing, _forward_without_gradients, _load, _set)


def _steps(model: nn.Module, x: Tensor, between: Between, order: str) -> list[Tensor]:
    """Return the gradients and buffers of a few steps with two forwards before the backwards."""
    seen: list[Tensor] = []
    for _ in range(2):
        model.zero_grad()
        first = model(x).square().mean()
        second = model(0.5 - x).square().mean()
        between(model, x)
        if order == "joint":
            (first + 2 * second).backward()
        else:
            for loss in (second, first):
                loss.backward()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        seen += [b.clone() for b in model.buffers()]
    return seen


def _planned(model: nn.Module, x: Tensor, budget: float) -> Rockmate:
    try:
        return Rockmate(model, x, budget, cost="flops")
    except InfeasibleBudgetError as error:
        return Rockmate(model, x, error.minimum_bytes, cost="flops")


@pytest.mark.parametrize("middle", MIDDLES)
def test_what_runs_again_reads_buffers_as_they_were(middle: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain, x = Sandwich(middle()), torch.randn(64, W)
    for budget in (0.7, 0.01):
        planned = _planned(copy.deepcopy(plain), x, budget)
        for between in BETWEEN:
            for order in ("joint", "reverse"):
                twin, again = copy.deepcopy(plain), copy.deepcopy(plain)
                planned.load_state_dict(again.state_dict())
                theirs = _steps(twin, x, between, order)
                ours = _steps(planned, x, between, order)
                assert len(ours) == len(theirs)
                for one, other in zip(ours, theirs, strict=True):
                    assert torch.equal(one, other), (budget, between.__name__, order)
        # Of one plan that a search may give, the prediction is 1 KiB too high.
        assert planned.measured_peak_bytes <= planned.plan.peak_bytes <= planned.budget_bytes


class SavesWritten(Keeps):
    """Autograd saves the buffer itself: a second forward changes what the first one needs."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.add_(x.abs().mean())
        return torch.tanh(self.linear(x) * self.b)


class SavesView(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        torch.mean(x.detach(), 0, out=self.b)
        return torch.tanh(self.linear(x) * self.b.view(1, W))


@pytest.mark.parametrize("middle", [SavesWritten, SavesView])
@pytest.mark.parametrize("budget", [1.0, 0.01])
def test_what_the_backward_itself_needs_must_not_change(
    middle: Callable[[], nn.Module], budget: float
) -> None:
    plain, x = Sandwich(middle()), torch.randn(64, W)
    planned = _planned(copy.deepcopy(plain), x, budget)
    for between in BETWEEN:
        if between is _set:  # what was saved is still there
            continue
        one, other = plain(x).sum(), planned(x).sum()
        if between is _nothing:
            plain(x), planned(x)
        between(plain, x)
        between(planned, x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            one.backward()
        with pytest.raises(ChangedTensorError, match=r"middle\.b"):
            other.backward()


def test_a_view_that_the_backward_reads_is_looked_at_with_its_input() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(W, W)

        def forward(self, x: Tensor) -> Tensor:
            left, right = x.chunk(2, 1)
            return torch.tanh(self.linear(left)) * right + self.linear(right) * left.t().t()

    model, x = Reads(), torch.randn(32, 2 * W)
    planned = _planned(copy.deepcopy(model), x, 0.01)
    y = planned(x)
    x[:, :W].add_(1)
    with pytest.raises(ChangedTensorError, match="args_0"):
        y.sum().backward()


def test_versions_of_written_buffers_move_as_in_plain_pytorch() -> None:
    model, x = Sandwich(InPlaceThenUsed()), torch.randn(32, W)
    planned = Rockmate(copy.deepcopy(model), x, 1.0)
    buffer, weight = planned.get_buffer("middle.b"), torch.ones(W, requires_grad=True)
    product = weight * buffer
    planned(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


class Observed(nn.Linear):
    """Training for quantisation: in the first step, buffers get a number for each row."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(inner, outer)
        self.register_buffer("low", torch.empty(0))
        self.register_buffer("high", torch.empty(0))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("zero", torch.zeros(1, dtype=torch.int32))
        self.register_buffer("on", torch.ones(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        seen = (self.on, self.on, self.low, self.high, self.scale, self.zero)
        quantised = torch.fused_moving_avg_obs_fake_quant(
            self.weight, *seen, 0.01, -128, 127, 0, per_row_fake_quant=True, symmetric_quant=True
        )
        return nn.functional.linear(x, quantised, self.bias)


@pytest.mark.parametrize("budget", [1.0, 0.6])
def test_buffers_that_grow_are_resident_and_not_in_the_budget(budget: float) -> None:
    torch.manual_seed(0)
    layers = (p for _ in range(3) for p in (Observed(W, 4 * W), nn.GELU(), Observed(4 * W, W)))
    model, x = nn.Sequential(*layers), torch.randn(16, W)
    plain = copy.deepcopy(model)
    planned = Rockmate(model, x, budget, cost="flops")
    for _ in range(3):
        for module in (planned, plain):
            module.zero_grad()
            module(x).square().mean().backward()
        assert_same_gradients(model, plain)
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


class Replaces(Keeps):
    """Puts a new tensor at the place of its buffer in each step."""

    def __init__(self, *, decides: bool) -> None:
        super().__init__()
        self.decides = decides

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        self.b = 0.9 * self.b + 0.1 * x.detach().mean(0)
        if self.decides and x.mean() > 100:  # so that it runs whole
            x = 2 * x
        return x * self.b


@pytest.mark.parametrize("decides", [False, True])
def test_a_buffer_that_a_step_replaces_is_freed_as_in_plain_pytorch(decides: bool) -> None:
    model = Sandwich(Replaces(decides=decides))
    x = torch.randn(4, W)
    planned = Rockmate(model, (x,), "1MB", cost="flops", self_test=False)
    for _ in range(4):
        before = weakref.ref(model.middle.b)
        planned(x).sum().backward()
        assert before() is None
