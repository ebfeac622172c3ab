"""Batches of many sizes: planned from what is known of other sizes, exact, within the budget."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rkgb.engine import trace_memory
from rockmate import Rockmate
from rockmate.options.options import KnownBlocks
from rockmate.planners import plan, replan
from rockmate.schedules.baselines import no_recomputation, recompute_all
from rockmate.schedules.simulate import simulate
from zoo.nets import hugging_face_gpt2
from zoo.problems import gpt_problem, unet_problem


def batch(length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 90, (4, length))}


def alike(rk: nn.Module, twin: nn.Module, sample: dict[str, Tensor]) -> int:
    """Take a step each, compare every bit, and return the bytes of a second planned one."""
    state, losses = torch.get_rng_state(), []
    for module in (rk, twin):
        torch.set_rng_state(state)
        losses.append(module(**sample).logits.square().mean())
        losses[-1].backward()
    assert torch.equal(*losses)
    assert_same_gradients(rk, twin)

    def step(_span: Any) -> None:
        rk(**sample).logits.square().mean().backward()

    torch.set_rng_state(state)
    peak = trace_memory(step, torch.device("cpu")).peak_bytes
    for p, q in zip(rk.parameters(), twin.parameters(), strict=True):
        p.grad = q.grad = None
    return peak


@pytest.mark.nightly
def test_lengths_shorter_and_longer_than_any_before() -> None:
    model = hugging_face_gpt2(layers=2, length=64)
    twin = copy.deepcopy(model)
    rk = Rockmate(model, batch(24), 0.6, cost="flops")
    for length in (20, 33, 1, 24):
        # Gradients of parameters, which the budget leaves out, come on top.
        gradients = sum(p.nbytes for p in model.parameters())
        assert alike(rk, twin, batch(length)) <= rk.budget_bytes + gradients
    how = {row.what.split("]")[0].split(", ")[-1]: row.how for row in rk.plans}
    assert how == {
        **{"24": "planned", "20": "resized", "33": "resized"},
        "1": "planned",  # a length of one is another program
    }
    assert all(row.peak_bytes <= rk.budget_bytes for row in rk.plans)


class Halves(nn.Module):
    """Where the size decides which way the forward goes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu() if len(x) > 4 else self.second(x).tanh()
        return y * x.shape[0] / (x.shape[0] + 1)


def test_sizes_that_decide_where_a_forward_goes() -> None:
    torch.manual_seed(0)
    model = Halves()
    twin = copy.deepcopy(model)
    rk = Rockmate(model, torch.randn(5, 6), "1MiB", cost="flops")
    for count in (7, 3, 2, 6):
        x = torch.randn(count, 6)
        for module in (rk, twin):
            module(x).square().sum().backward()
        assert_same_gradients(rk, twin)
        assert torch.equal(rk(x), twin(x))
    assert [row.how for row in rk.plans] == ["planned", "resized", "planned", "resized", "resized"]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale).tanh()


def test_a_number_and_then_a_size_that_change() -> None:
    torch.manual_seed(0)
    model = Scaled()
    twin = copy.deepcopy(model)
    rk = Rockmate(model, torch.randn(5, 6), "1MiB", cost="flops")
    changes = ((3.0, 5, "recorded"), (3.0, 4, "resized"), (0.5, 4, "recorded"), (0.5, 7, "resized"))
    for scale, count, how in changes:
        model.scale = twin.scale = scale
        x = torch.randn(count, 6)
        for module in (rk, twin):
            module(x).square().sum().backward()
        assert_same_gradients(rk, twin)
        assert rk.plans[-1].how == how


@pytest.mark.slow
@pytest.mark.parametrize("length", [90, 150])
def test_a_plan_at_another_size_is_nearly_as_good_as_one_that_is_searched_for(length: int) -> None:
    problem, known = gpt_problem(4, attention="naive"), KnownBlocks()
    most = simulate(problem, no_recomputation(problem)).peak_bytes
    least = simulate(problem, recompute_all(problem)).peak_bytes
    budget = int(0.6 * most + 0.4 * least)
    first = plan(problem, budget, effort="fast", known=known)
    other = gpt_problem(4, attention="naive", sequence=length)
    found = replan(other, budget, [(problem, first.steps)], known)
    assert found is not None
    found.check(other)
    assert found.peak_bytes <= budget
    searched = plan(other, budget, effort="fast")
    assert found.time_ms <= 1.03 * searched.time_ms


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_what_is_larger_than_all_before_is_squeezed_into_the_budget(share: float) -> None:
    problem = unet_problem()
    budget = int(share * simulate(problem, no_recomputation(problem)).peak_bytes)
    found = replan(problem, budget, [], KnownBlocks())
    assert found is not None
    assert found.peak_bytes <= budget
    assert found.overhead < 0.35


def test_where_nothing_is_known_nothing_is_promised() -> None:
    problem = gpt_problem(2)
    assert replan(problem, 1, [], KnownBlocks()) is None
    everything = simulate(problem, no_recomputation(problem)).peak_bytes
    found = replan(problem, everything, [], KnownBlocks())
    assert found is not None
    assert found.overhead_ms == 0


class TwoOutputs(nn.Module):
    """A loss and what it is made from, as models of Hugging Face return them."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 128) * 6
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise((*widths, 16))]
        self.body = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))
        self.head = nn.Linear(16, 200)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(self.body(x))
        return scores.tanh().square().mean(), scores


def step_of(module: nn.Module, x: Tensor, *, both: bool) -> Tensor:
    loss, scores = module(x)
    result: Tensor = loss + scores.cos().mean() if both else loss
    del scores  # a loss alone is planned for without them
    result.backward()
    return result


def test_a_size_is_recorded_once_for_the_gradients_that_came_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = TwoOutputs()
    twin = copy.deepcopy(model)
    rk = Rockmate(model, torch.randn(64, 16), 0.9, cost="flops", planner="segments")
    caplog.set_level("INFO", "rockmate")

    def steps(rows: int, *, both: bool) -> int:
        """Take a step each; return how many more recordings were made when it began."""
        caplog.clear()
        x = torch.randn(rows, 16)
        assert torch.equal(step_of(rk, x, both=both), step_of(twin, x, both=both))
        assert_same_gradients(rk, twin)
        again = caplog.text.count("recording another backward")
        peak = trace_memory(lambda _: step_of(rk, x, both=both), torch.device("cpu")).peak_bytes
        for module in (rk, twin):
            module.zero_grad()
        # Gradients of parameters, and what the loss outside makes of an output, come on top.
        outside = sum(p.nbytes for p in model.parameters()) + 2 * both * rows * 200 * 4
        assert peak <= rk.budget_bytes + outside
        return again

    assert steps(64, both=False) == 0, "a loss alone is foreseen while planning"
    assert [steps(rows, both=False) for rows in (60, 70, 80)] == [0, 0, 0]
    assert [row.how for row in rk.plans] == ["planned", "resized", "resized", "resized"]
    assert steps(80, both=True) == 1, "they are planned for when they come"
    executor = list(rk._rockmate.plans)[-1].executor
    assert executor.expected.is_apart, "the plan had no room for them"
    assert steps(80, both=False) == 0
    assert steps(80, both=True) == 0
    assert steps(76, both=True) == 0
