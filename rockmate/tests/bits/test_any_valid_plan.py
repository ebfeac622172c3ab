"""The executor runs any valid plan, not just the solvers': right bits, and the predicted bytes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rkgb.capture import twin_of
from rkgb.elements import storage_id
from rkgb.engine import Sample, external_values
from rkgb.run import without_idle_steps
from rockmate import InvalidPlanError, Rockmate
from rockmate.comparison.eager import differences, run_step
from rockmate.networks.executables import executable
from rockmate.networks.planned import Planned
from rockmate.problems.problem import Problem
from rockmate.runtime.execute import Executor
from rockmate.schedules.liveness import check_order
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Step, Steps
from zoo.nets import network

CPU = torch.device("cpu")
NETS = ["gpt", "resnet", "unet", "lstm", "tied", "transformer", "uno"]
_planned: dict[str, tuple[nn.Module, Any, Planned]] = {}


def planned(name: str) -> tuple[nn.Module, Any, Planned]:
    if name not in _planned:
        model, sample = network(name)
        wrapped = Rockmate(model, sample, "1GiB", cost="flops", self_test=False)
        _planned[name] = (model, sample, wrapped._rockmate.planned)
    return _planned[name]


def random_steps(problem: Problem, seed: int) -> Steps:
    """Insert recomputations at random places; every such plan is valid."""
    source = random.Random(seed)
    count = len(problem.nodes)
    share = source.choice([0.02, 0.1, 0.4])
    steps = []
    for k in range(count):
        if source.random() < 2 * share:
            low = source.randrange(k + 1)
            steps += [Step("F", again) for again in range(low, min(k, low + 6))]
        steps.append(Step("F", k))
    for node in problem.backward_order:
        steps += [Step("F", k) for k in range(count) if source.random() < share]
        if source.random() < 0.5:
            low = source.randrange(count)
            steps += [Step("F", k) for k in range(low, min(count, low + 6))]
        steps.append(Step("B", node))
    return tuple(steps)


def bound(planned: Planned, steps: Steps) -> Executor:
    check_order(planned.problem, steps)
    network = planned.network
    # Recomputations that nobody reads are left out before a plan runs.
    useful = without_idle_steps(network.graph, steps)
    return Executor(executable(network.graph, useful, network.measured))


@pytest.mark.parametrize("name", NETS)
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_random_plans_compute_eagers_bits_in_the_predicted_bytes(name: str, seed: int) -> None:
    model, sample, plan = planned(name)
    steps = random_steps(plan.problem, seed)
    executor = bound(plan, steps)
    given = Sample.of(model, sample)
    twin = twin_of(model).module
    eager = run_step(twin, twin, given)
    twin = twin_of(model).module

    def call(*call_args: Any) -> Any:
        leaves = tuple(pytree.tree_leaves((call_args, {})))
        external = external_values(plan.network.basic, twin, leaves)
        return executor(external, other_gradients)

    ours = run_step(call, twin, given)
    assert not differences(eager, ours)
    useful = without_idle_steps(plan.network.graph, steps)
    predicted = simulate(plan.problem, [Step(*step) for step in useful]).peak_bytes
    assert ours.peak_bytes <= predicted
    assert ours.peak_bytes >= 0.98 * predicted - 20_000, "the prediction must not be padded"


def other_gradients(_tangents: Any) -> Any:
    raise AssertionError("the gradients arrive as they were recorded")


def test_a_plan_out_of_order_is_refused_before_it_runs() -> None:
    _, _, plan = planned("gpt")
    steps = list(random_steps(plan.problem, 3))
    backwards = [t for t, step in enumerate(steps) if step.kind == "B"]
    swapped = list(steps)
    swapped[backwards[0]], swapped[backwards[1]] = steps[backwards[1]], steps[backwards[0]]
    dropped = [step for t, step in enumerate(steps) if t != backwards[2]]
    doubled = [*steps[: backwards[3]], steps[backwards[3]], *steps[backwards[3] :]]
    unstarted = steps[1:]
    ahead = [*steps[:1], Step("F", 2), *steps[1:]]
    for broken in (swapped, dropped, doubled, unstarted, ahead):
        with pytest.raises(InvalidPlanError):
            bound(plan, tuple(broken))


def test_gradients_that_belong_to_the_user_are_never_written_to() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(4, 8)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.net(x)
            return y, y.sin() + y.cos()

    wrapped = Rockmate(Twice(), x, "1MiB", cost="flops")
    first, second = wrapped(x)
    given = [torch.ones_like(first), torch.full_like(second, 2.0)]
    before = [g.clone() for g in given]
    torch.autograd.backward([first, second], given)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    assert storage_id(given[0]) != storage_id(given[1])


class Views(nn.Module):
    """Views of two inputs and of two parameters, and an output that is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left = self.first.t().unsqueeze(0) * x.t().unsqueeze(0).sin()
        right = self.second.t().unsqueeze(0) * y.t().unsqueeze(0).exp()
        return (left + right).transpose(1, 2)


def in_the_middle_of_memory(tensor: Tensor) -> Tensor:
    """Return a copy that begins behind the beginning of its storage."""
    whole = torch.zeros(tensor.numel() + 7)
    return whole[5:-2].view(tensor.shape).copy_(tensor.detach())


def test_what_lies_elsewhere_in_memory_than_when_planned_is_read_there() -> None:
    """A storage may be shared, or begun before a tensor, at one time and not at another."""
    torch.manual_seed(0)
    model, sample = Views(), torch.randn(6, 6)
    model.second.data = model.first.data
    wrapped = Rockmate(model, (sample, sample), 1.0, cost="flops")
    for parameter in model.parameters():
        parameter.data = in_the_middle_of_memory(torch.randn(6, 6))
    inputs = [in_the_middle_of_memory(torch.randn(6, 6)) for _ in range(2)]
    found = []
    for module in (model, wrapped):
        out = module(*inputs)
        upstream = in_the_middle_of_memory(torch.arange(36.0).view(1, 6, 6))
        gradients = torch.autograd.grad(out, [model.first, model.second], upstream)
        found.append([out.detach(), *gradients])
    assert all(map(torch.equal, *found))
