"""Gradients that a forward makes, and its backward only scales in place or hands over."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rkgb.capture import twin_of
from rkgb.engine import Sample, external_values
from rkgb.run import without_idle_steps
from rockmate import InfeasibleBudgetError, Rockmate
from rockmate.comparison.eager import differences, run_step
from rockmate.networks.executables import executable
from rockmate.networks.planned import Planned
from rockmate.runtime.execute import Executor
from rockmate.schedules.steps import Step


class Fused(torch.autograd.Function):
    """A projection with cross entropy, which keeps its gradients in place of the logits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = x @ weight.t()
        loss = nn.functional.cross_entropy(logits, target)
        chances = torch.softmax(logits, -1)
        chances[torch.arange(len(target)), target] -= 1
        chances /= len(target)
        ctx.save_for_backward(chances @ weight, chances.t() @ x)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        of_x, of_weight = ctx.saved_tensors
        return of_x.mul_(grad), of_weight.mul_(grad), None


class FusedAsViews(Fused):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        of_x, of_weight = ctx.saved_tensors
        of_x.view(-1).mul_(grad)
        return of_x.view_as(of_x), of_weight.mul_(grad).view(-1).view_as(of_weight), None


class FusedAsItIs(Fused):
    """Whose gradients are handed over without any operation, as those of a loss of one."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (*ctx.saved_tensors, None)


class FusedInTurns(Fused):
    """Whose gradient of `x` is written to by the backwards of two nodes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        first = torch.cos(x)
        loss = nn.functional.cross_entropy(x @ weight.t(), target)
        second = torch.sin(first)
        ctx.save_for_backward(first, first.view(-1), second, weight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        first, flat, second, weight = ctx.saved_tensors
        first.mul_(grad)
        return flat.view_as(first), weight * first.mul_(second).sum(), None


class Cosine(torch.autograd.Function):
    """A sine that keeps its derivative, and scales it in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.cos(x))
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        made: Tensor = ctx.saved_tensors[0].mul_(grad)
        return made


class Scaled(torch.autograd.Function):
    """A product that keeps the result for its backward, which writes to it; others read it too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.exp(-x * x)
        second = torch.tanh(first) * weight
        ctx.save_for_backward(first, second)
        return second, first.sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> Any:
        first, second = ctx.saved_tensors
        of_weight = first.mul_(grad).sum(0)
        return first.add_(other).mul_(second), of_weight


class Classified(nn.Module):
    def __init__(self, loss: type[Fused]) -> None:
        super().__init__()
        self.loss = loss
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh())
        self.weight = nn.Parameter(torch.randn(50, 16))

    def forward(self, x: Tensor) -> Tensor:
        target = torch.arange(len(x)) % 50
        made: Tensor = self.loss.apply(self.body(x), self.weight, target)
        return made


class Tied(Classified):
    """The projection has the weight that the body reads before, and after in place of the loss."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x) @ self.weight.t()) @ self.weight
        target = torch.arange(len(x)) % 50
        made: Tensor = self.loss.apply(h, self.weight, target)
        return made + (self.weight * self.weight).mean()


class OfTorch(Classified):
    """Torch's own fused loss, whose chunks make the gradients."""

    def forward(self, x: Tensor) -> Tensor:
        target = torch.arange(len(x)) % 50
        options = nn.LinearCrossEntropyOptions()
        made: Tensor = nn.functional.linear_cross_entropy(
            self.body(x), self.weight, target, options=options
        )
        return made


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Cosine.apply(layer(x))
        return x.square().mean()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        second, first = Scaled.apply(torch.tanh(self.inner(x)), self.weight)
        return torch.tanh(self.outer(second) * first).square().mean()


KINDS = {
    **{f"{loss.__name__}": lambda loss=loss: Classified(loss) for loss in
       (Fused, FusedAsViews, FusedAsItIs, FusedInTurns)},
    **{f"tied {loss.__name__}": lambda loss=loss: Tied(loss) for loss in
       (Fused, FusedAsViews, FusedAsItIs, FusedInTurns)},
    "waves": Waves,
    "gated": Gated,
    **({"of torch": lambda: OfTorch(Fused)} if hasattr(nn, "LinearCrossEntropyOptions") else {}),
}  # fmt: skip


@pytest.mark.parametrize("share", [1.0, 0.7, 0.01])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_and_peak_are_as_promised(kind: str, share: float) -> None:
    torch.manual_seed(0)
    model = KINDS[kind]()
    x = torch.randn(24, 16)
    plain = copy.deepcopy(model)
    try:
        planned = Rockmate(model, x, share, cost="flops")
    except InfeasibleBudgetError as error:
        planned = Rockmate(model, x, error.minimum_bytes, cost="flops")
    for scale in (1.0, 1.5, -0.3):
        outs = []
        for net in (plain, planned):
            net.zero_grad()
            outs.append(net(x))
            (outs[-1] * scale).backward()
        assert torch.equal(*outs)
        assert_same_gradients(plain, model)
    assert planned.plan.peak_bytes <= planned.budget_bytes
    assert planned.measured_peak_bytes == planned.plan.peak_bytes


def random_steps(planned: Planned, seed: int, never_again: frozenset[int]) -> tuple[Step, ...]:
    """Return a valid plan that runs nodes again before each backward, but for those."""
    source, problem = random.Random(seed), planned.problem
    nodes = range(len(problem.nodes))
    steps = [Step("F", node) for node in nodes]
    for node in problem.backward_order:
        again = (k for k in nodes if k not in never_again and source.random() < 0.4)
        steps += [*(Step("F", k) for k in again), Step("B", node)]
    return tuple(steps)


@pytest.mark.parametrize("kind", ["FusedInTurns", "tied FusedInTurns"])
def test_no_plan_runs_again_what_a_backward_has_written_to(kind: str) -> None:
    torch.manual_seed(0)
    model, x = KINDS[kind](), torch.randn(24, 16)
    rockmate = Rockmate(model, x, "1GiB", cost="flops", self_test=False)
    planned = rockmate._rockmate.planned
    network, given = planned.network, Sample.of(model, x)
    twin = twin_of(model).module
    eager = run_step(twin, twin, given)

    def is_wrong(never_again: frozenset[int], seed: int) -> bool:
        steps = without_idle_steps(network.graph, random_steps(planned, seed, never_again))
        executor = Executor(executable(network.graph, steps, network.measured))
        twin = twin_of(model).module

        def call(x: Tensor) -> Any:
            external = external_values(network.basic, twin, (x,))
            return executor(external, lambda _: None)

        return bool(differences(eager, run_step(call, twin, given)))

    assert not any(is_wrong(network.fixed, seed) for seed in range(12))
    assert any(is_wrong(frozenset(), seed) for seed in range(12))
