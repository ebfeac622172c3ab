"""Roots that decide by values: their Python runs, and what they call is planned in one budget."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rockmate
from oracles.decisions import assert_steps_like, outcome, peak, seed
from oracles.training import assert_same_gradients, measured_peak_bytes
from rkgb.engine import trace_memory
from rockmate import InfeasibleBudgetError, PlanFileError, Rockmate
from zoo.deciding import NETS, WIDTH, Depth, rows


def planned(name: str, budget: Any = 0.7, **options: Any) -> tuple[Any, nn.Module, Any]:
    make, batches = NETS[name]
    torch.manual_seed(0)
    model = make().train()
    twin = copy.deepcopy(model)
    seed(7)
    state = random.getstate()
    rk = Rockmate(model, batches(0), budget, cost="flops", **options)
    assert random.getstate() == state
    return rk, twin, batches


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NETS)
def test_steps_of_other_decisions_have_plain_bits_and_stay_in_the_budget(name: str) -> None:
    rk, twin, batches = planned(name)
    assert_steps_like(rk, twin, batches)
    ours, plain = peak(rk, batches(0)), peak(twin, batches(0))
    assert ours <= rk.budget_bytes == rk.plan.budget_bytes
    assert ours < 0.75 * plain
    assert rk.measured_peak_bytes <= rk.budget_bytes < rk.eager_peak_bytes
    if name != "forcing":  # the cell is one operation, that has only its gates to save
        assert rk.plan.overhead > 0


def test_the_plan_says_what_decides_where_and_what_is_planned() -> None:
    rk, _, _ = planned("depth")
    text = str(rk.plan)
    assert "draws from Python's `random`" in text.splitlines()[0]
    assert "(deciding.py:" in text.splitlines()[0]
    assert "its 5 blocks are planned one by one" in text
    assert {row.path for row in rk.plan.rows} | set(rk.plan.unseen) == {
        f"layers.{number}" for number in range(5)
    }
    assert rk.plan.opaque == ("",)
    assert "by blocks" in repr(rk)
    assert len(rk.plans) == 1
    assert rk.plan.summary().startswith("peak ")


def test_a_step_with_all_layers_stays_in_the_budget_that_few_layers_were_planned_in() -> None:
    rk, twin, batches = planned("depth", 250_000)
    assert rk.plan.unseen, "the sample's step leaves layers out"
    rk.layerdrop = twin.layerdrop = 0.0
    assert measured_peak_bytes(rk, (batches(1),), grads_exist=True) <= 250_000
    assert measured_peak_bytes(twin, (batches(1),), grads_exist=True) > 400_000


def test_the_model_itself_stays_plain() -> None:
    rk, twin, batches = planned("depth")
    model = rk.original
    kinds = [type(module) for module in twin.modules()]
    assert [type(module) for module in model.modules()] == kinds
    outcome(rk, batches(0), 1)
    assert [type(module) for module in model.modules()] == kinds
    assert list(rk.state_dict()) == list(twin.state_dict())
    model.zero_grad()
    plain, ours = peak(twin, batches(0)), peak(model, batches(0))
    assert ours == plain
    with rockmate.plain():
        assert peak(rk, batches(0)) == plain
    with torch.no_grad():
        seed(3)
        result = rk(batches(0))
    seed(3)
    assert torch.equal(result, twin(batches(0)).detach())
    rk.eval()
    assert torch.equal(rk(batches(0)), twin.eval()(batches(0)))
    rk.train()
    outcome(rk, batches(0), 1)


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [True, False])
def test_apply_with_and_without_a_sample(sampled: bool) -> None:
    torch.manual_seed(0)
    model = Depth().train()
    twin = copy.deepcopy(model)
    seed(7)
    budget = int(0.7 * peak(copy.deepcopy(twin), rows(0)))
    if sampled:
        seed(7)
        assert rockmate.apply(model, rows(0), budget, cost="flops") is model
    else:
        rockmate.apply(model, budget=budget, cost="flops")
        for module in (model, twin):
            outcome(module, rows(0), 7)
        assert_same_gradients(model, twin)
        model.zero_grad()
        twin.zero_grad()
    assert_steps_like(model, twin, rows)
    assert peak(model, rows(0)) <= budget
    model.zero_grad()
    if sampled:  # copies plan anew, however the first plan was made
        other = copy.deepcopy(model)
        assert_steps_like(other, copy.deepcopy(twin), rows, steps=2)
        loaded = pickle.loads(pickle.dumps(model))
        assert_steps_like(loaded, copy.deepcopy(twin), rows, steps=2)
    rockmate.remove(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in twin.modules()]
    assert_steps_like(model, twin, rows, steps=1)


@pytest.mark.nightly
def test_a_wrapper_is_copied_and_calls_of_other_sizes_are_planned() -> None:
    rk, twin, batches = planned("depth", 300_000)
    other = copy.deepcopy(rk)
    assert_steps_like(other, copy.deepcopy(twin), batches, steps=1)
    assert other.budget_bytes == 300_000
    assert_steps_like(rk, twin, lambda step: batches(step)[: 40 + step % 2], steps=3)
    assert len(rk.plans) == 3
    with pytest.raises(InfeasibleBudgetError, match="planned block by block"):
        rk(torch.randn(4000, WIDTH))


def test_there_is_no_file_of_such_a_plan(tmp_path: Path) -> None:
    rk, _, _ = planned("depth")
    with pytest.raises(PlanFileError, match="decides by values"):
        rk.save_plan(tmp_path / "plan.json")
    with pytest.raises(PlanFileError, match="decides by values"):
        rk.plan.save_plan(tmp_path / "plan.json")


def test_a_budget_that_nothing_fits_names_one_that_does() -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        planned("depth", 0.05)
    rk, twin, batches = planned("depth", caught.value.minimum_bytes)
    assert peak(rk, batches(0)) <= caught.value.minimum_bytes < 0.5 * peak(twin, batches(0))


def test_planning_leaves_gradients_of_the_sample_alone() -> None:
    torch.manual_seed(0)
    model = Depth().train()
    twin = copy.deepcopy(model)
    x = rows(0).requires_grad_()
    seed(7)
    rk = Rockmate(model, x, 0.7, cost="flops")
    assert x.grad is None
    other = x.detach().clone().requires_grad_()
    for step in range(2):  # the gradients are added up
        for module, given in ((rk, x), (twin, other)):
            seed(step)
            first, second = module(given), module(given)
            second.backward()
            first.backward(retain_graph=True)
            first.backward()
        assert x.grad is not None
        assert other.grad is not None
        assert torch.equal(x.grad, other.grad)
    assert_same_gradients(rk, twin)


def test_hooks_on_blocks_are_called_once_a_step() -> None:
    rk, twin, batches = planned("encoder")
    called: list[str] = []
    for number, layer in enumerate(rk.inner.layers):
        layer.register_forward_hook(lambda *_, n=number: called.append(f"F{n}"))
        layer.register_full_backward_hook(lambda *_, n=number: called.append(f"B{n}"))
    outcome(rk, batches(1), 2)
    forwards = [name for name in called if name[0] == "F"]
    backwards = [name for name in called if name[0] == "B"]
    assert backwards == ["B" + name[1:] for name in reversed(forwards)]
    assert len(set(forwards)) == len(forwards) > 0
    rk.zero_grad()
    assert_steps_like(rk, twin, batches, steps=2)


def _layer(_place: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


class Filled(nn.Module):
    """Torch sums the gradient of a filling value otherwise where a mode sees the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Sequential(*map(_layer, range(4))) for _ in range(2))
        self.filling = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        x = self.first(x)
        x = 0.5 * x if x.mean() > 100 else x
        wide = x.repeat(1, 4)
        return self.last(wide.masked_fill(wide > 0.5, self.filling)[:16, :8])


def test_steps_for_planning_are_metered_as_they_are_in_training() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    with pytest.raises(InfeasibleBudgetError) as refused:
        Rockmate(Filled(), (x,), 1, cost="flops")
    least = refused.value.minimum_bytes
    rk = Rockmate(Filled(), (x,), least, cost="flops", self_test=False)
    for parameter in rk.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step(_span: Any = None) -> None:
        out = rk(x)
        out.sum().backward()

    step()
    scalars_bytes = 8  # a sum and its gradient are the user's
    assert trace_memory(step, torch.device("cpu")).peak_bytes <= least + scalars_bytes
