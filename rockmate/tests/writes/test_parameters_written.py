"""Forwards that write parameters: planning leaves them as they were, and steps write them once."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn

from rockmate import InfeasibleBudgetError, Rockmate, apply_to_blocks


def body(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(count)])


class Normed(nn.Module):
    """Weights of unit norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight = body(), nn.Parameter(torch.randn(16, 16))

    def change(self) -> None:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        self.change()
        return nn.functional.linear(self.body(x), self.weight).tanh()


class ThroughData(Normed):
    def change(self) -> None:
        self.weight.data.clamp_(-0.5, 0.5)


class Foreach(Normed):
    def change(self) -> None:
        torch._foreach_mul_([p.detach() for p in self.parameters()], 0.99)


class MovesData(Normed):
    def change(self) -> None:
        self.weight.data = self.weight.data * 0.5


class MovesClamped(nn.Linear):
    """Moves its weight, in a part of its own; others may use it too."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clamp(-0.2, 0.2)
        return super().forward(x)


class MovesInside(nn.Module):
    def __init__(self, is_shared: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), MovesClamped(16, 16), nn.Tanh())
        if is_shared:
            self.body[0].weight = self.body[2].weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


class MovesShared(MovesInside):
    def __init__(self) -> None:
        super().__init__(is_shared=True)


class MovesBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = body()
        self.register_buffer("mean", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        self.mean.data = self.mean * 0.9 + y.detach().mean(0) * 0.1
        return y * self.mean


class Momentum(nn.Module):
    """A second encoder follows the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = body()
        self.second = copy.deepcopy(self.first).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for ours, theirs in zip(self.second.parameters(), self.first.parameters(), strict=True):
                ours.mul_(0.9).add_(theirs, alpha=0.1)
            target = self.second(x)
        y: Tensor = self.first(x) * target
        return y


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.body = nn.Embedding(32, 16, max_norm=1.0), body()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(self.rows(x.abs().mul(4).long().clamp(0, 31)[:, 0]))
        return y


class Deciding(Normed):
    """Runs whole, since it looks at what it has computed."""

    def forward(self, x: Tensor) -> Tensor:
        self.change()
        y = nn.functional.linear(x, self.weight).tanh()
        return y * 2 if y.sum().item() > 1e9 else y


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(body(2), Deciding(), body(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


def state(model: nn.Module) -> list[tuple[str, Tensor, int, bool]]:
    named = model.named_parameters()
    return [(n, p.detach().clone(), p._version, p.grad is None) for n, p in named]


def assert_untouched(model: nn.Module, before: list[tuple[str, Tensor, int, bool]]) -> None:
    for was, now in zip(before, state(model), strict=True):
        assert torch.equal(was[1], now[1]), was[0]
        assert was[2:] == now[2:], was[0]


def planned(model: nn.Module, sample: Tensor, budget: float) -> Rockmate:
    """Plan within a budget, or the smallest one where that is too small."""
    before = state(model)
    try:
        wrapped = Rockmate(model, sample, budget, cost="flops", progress=False)
    except InfeasibleBudgetError as error:
        assert_untouched(model, before)
        wrapped = Rockmate(model, sample, error.minimum_bytes, cost="flops", progress=False)
    assert_untouched(model, before)
    return wrapped


@pytest.mark.parametrize("kind", [MovesData, MovesInside, MovesShared, MovesBuffer])
def test_memory_that_moves_is_predicted(kind: type[nn.Module]) -> None:
    """A step that gives tensors other memory takes what is predicted, however often it is asked."""
    sample, peaks = torch.randn(32, 16), []
    for _ in range(2):
        wrapped = planned(kind(), sample, 1.0)
        peaks.append(wrapped.eager_peak_bytes)
        for less in (64, 128, 1024):
            below = planned(kind(), sample, wrapped.budget_bytes - less)
            assert below.measured_peak_bytes <= below.budget_bytes
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("budget", [1.0, 0.6])
@pytest.mark.parametrize(
    "kind",
    [
        *(Normed, ThroughData, Foreach, MovesData, MovesInside, MovesShared, MovesBuffer),
        *(Momentum, Bags, Around),
    ],
)
def test_planning_leaves_parameters_and_steps_write_them_as_plain_does(
    kind: type[nn.Module], budget: float
) -> None:
    torch.manual_seed(0)
    plain = kind()
    model = copy.deepcopy(plain)
    wrapped = planned(model, torch.randn(32, 16), budget)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, model)]
    for _ in range(3):
        x = torch.randn(32, 16)
        for module, optimizer in zip((plain, wrapped), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
        for (name, theirs), ours in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(theirs, ours), name
            if theirs.grad is None:
                assert ours.grad is None, name
            else:
                assert ours.grad is not None, name
                assert torch.equal(theirs.grad, ours.grad), name
        for optimizer in optimizers:
            optimizer.step()


def test_what_an_interrupted_planning_has_written_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Normed()
    before = state(model)

    def interrupted(*_: object, **__: object) -> Tensor:
        assert not torch.equal(model.weight, before[0][1])
        raise KeyboardInterrupt

    monkeypatch.setattr(nn.functional, "linear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Rockmate(model, torch.randn(32, 16), 1.0, cost="flops", progress=False)
    assert_untouched(model, before)


@pytest.mark.parametrize("kind", [Normed, ThroughData, Foreach, MovesData])
def test_planning_by_blocks_leaves_parameters_whether_it_is_refused_or_not(
    kind: type[Normed],
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(kind(), body(2), body(2)), torch.randn(32, 16)
    before = [(p, p.data_ptr(), p.detach().clone()) for p in model.parameters()]
    budget = 1
    for is_refused in (True, False):
        with pytest.raises(InfeasibleBudgetError) if is_refused else contextlib.nullcontext() as no:
            apply_to_blocks(model, x, budget, blocks=["0", "1", "2"], compare=False, cache=False)
        budget = no.value.minimum_bytes if no is not None else 0
        for parameter, place, content in before:
            assert parameter.data_ptr() == place
            assert torch.equal(parameter, content)


def test_memory_that_a_forward_made_in_inference_mode() -> None:
    torch.manual_seed(0)
    model = MovesInside()
    twin = copy.deepcopy(model)
    x = torch.randn(8, 16)
    planned = Rockmate(model, x, 2**20)
    assert planned.plan.opaque
    for each in (planned, twin):
        with torch.inference_mode():
            each(x)
    with pytest.warns(RuntimeWarning, match="made under torch.inference_mode"):
        planned(x).square().mean().backward()
    twin(x).square().mean().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p.grad, q.grad)
