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

from rkgb.engine import (
    bind_inputs,
    external_values,
    storage_id,
    twin_of,
    without_idle_steps,
)
from rockmate import InvalidPlanError, Rockmate
from rockmate.liveness import check_order
from rockmate.pipeline import Planned, executable
from rockmate.problem import Problem
from rockmate.runtime.eager import compare, run_step
from rockmate.runtime.execute import Executor
from rockmate.simulate import simulate
from rockmate.steps import Step, Steps
from rockmate.testing_nets import network

CPU = torch.device("cpu")
NETS = ["gpt", "resnet", "unet", "lstm", "tied", "transformer", "uno"]
_planned: dict[str, tuple[nn.Module, Any, Planned]] = {}


def planned(name: str) -> tuple[nn.Module, Any, Planned]:
    if name not in _planned:
        model, sample = network(name)
        wrapped = Rockmate(model, sample, "1GiB", cost="flops", self_test=False)
        _planned[name] = (model, sample, vars(wrapped)["_plans"][0])
    return _planned[name]


def random_steps(problem: Problem, seed: int) -> Steps:
    """Insert recomputations at random places; every such plan is valid."""
    source = random.Random(seed)
    count = len(problem.nodes)
    steps = [Step("F", k) for k in range(count)]
    share = source.choice([0.02, 0.1, 0.4])
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
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_plans_compute_eagers_bits_in_the_predicted_bytes(name: str, seed: int) -> None:
    model, sample, plan = planned(name)
    steps = random_steps(plan.problem, seed)
    executor = bound(plan, steps)
    args, kwargs = bind_inputs(sample)
    twin = twin_of(model)
    eager = run_step(twin, twin, args, kwargs, CPU)
    twin = twin_of(model)

    def call(*call_args: Any) -> Any:
        leaves = tuple(pytree.tree_leaves((call_args, {})))
        external = external_values(plan.network.graph.dataflow.basic, twin, leaves)
        return executor(external, other_gradients)

    ours = run_step(call, twin, args, kwargs, CPU)
    compare(eager, ours, name)
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
    for broken in (swapped, dropped, doubled, unstarted):
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
