"""A loss outside of the module: what it took in a step is left to it from then on."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import rockmate
from fake_cuda.allocator import AllocatorRules
from fake_cuda.device import fake_cuda
from oracles.training import assert_same_gradients
from rkgb.engine import trace_memory

HOST = torch.device("cpu")
Loss = Callable[[Tensor], Tensor]


def network() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)]
    return nn.Sequential(*layers)


def greedy(y: Tensor) -> Tensor:
    """Keep more than is left to a loss before it is seen."""
    terms = [(y * k).exp().sin().sum() for k in range(1, 16)]
    return torch.stack(terms).sum()


LOSSES: dict[str, Loss] = {
    "mean": lambda y: y.mean(),
    "as expected": lambda y: y.abs().square().mean(),
    "greedy": greedy,
}


def planned(share: float = 1.1, batch: int = 256, **more: Any) -> tuple[Any, Any, Tensor, int]:
    torch.manual_seed(0)
    model, x = network(), torch.randn(batch, 64)
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-3)
    how: dict[str, Any] = {"optimizer": stepper, "cost": "flops", **more}
    with pytest.raises(rockmate.InfeasibleBudgetError) as refused:
        rockmate.Rockmate(model, x, memory=1000, **how)
    memory = int(share * refused.value.minimum_bytes)
    return rockmate.Rockmate(model, x, memory=memory, **how), stepper, x, memory


def peaks(rk: nn.Module, stepper: Any, x: Tensor, loss_of: Loss, count: int) -> list[int]:
    """Return the most that is held in each of some whole steps, the loss included."""

    def step(_span: Any) -> None:
        loss = loss_of(rk(x))
        loss.backward()
        stepper.step()
        stepper.zero_grad()

    found = []
    for _ in range(count):
        state = (v for s in stepper.state.values() for v in s.values())
        held = sum(t.nbytes for t in (*rk.parameters(), *state, x) if isinstance(t, Tensor))
        found.append(held + trace_memory(step, HOST).peak_bytes)
    return found


def part(rk: Any) -> tuple[str, int]:
    return next((p.name, p.size_bytes) for p in rk.memory.parts if "loss" in p.name)


@pytest.mark.parametrize("rules", ["host", "blocks"])
def test_what_is_left_over_goes_to_activations(rules: str) -> None:
    blocks = AllocatorRules.shrunk(64, expandable=True)
    with fake_cuda(blocks) if rules == "blocks" else warnings.catch_warnings():
        rk, stepper, x, memory = planned()
        before, (name, left_bytes) = rk.plan.overhead, part(rk)
        assert name == "loss outside of the module"
        assert left_bytes == 4 * x.nbytes
        first = peaks(rk, stepper, x, LOSSES["mean"], 1)
        name, taken_bytes = part(rk)
        assert name == "loss outside of the module, as seen"
        assert taken_bytes < left_bytes // 100
        more = peaks(rk, stepper, x, LOSSES["mean"], 3)[1:]  # the next call plans
        assert rk.plan.overhead < before
        assert [row.why for row in rk.plans] == ["what the loss outside of the module took"]
        assert max(first) < max(more) <= memory
        assert not _get_current_dispatch_mode_stack()


def test_a_loss_that_takes_more_gets_a_plan_that_leaves_it() -> None:
    rk, stepper, x, memory = planned(1.7, 1024)
    before = rk.plan.peak_bytes
    first = peaks(rk, stepper, x, greedy, 1)[0]
    assert part(rk)[1] > 4 * x.nbytes
    rest = memory - rk.memory.resident_bytes
    assert rk.plan.peak_bytes == before > rest, "the plan leaves too little, another one ran"
    assert max(first, *peaks(rk, stepper, x, greedy, 3)) <= memory


def test_a_loss_that_no_plan_leaves_room_for_is_told_once() -> None:
    rk, stepper, x, _ = planned(1.0)
    peaks(rk, stepper, x, greedy, 1)
    before = rk.plan.peak_bytes
    with pytest.warns(RuntimeWarning, match="the loss outside of Sequential takes more than was"):
        greedy(rk(x)).backward()
    assert rk.plan.peak_bytes <= before, "what takes least runs from now on"
    rk.zero_grad()
    twin = copy.deepcopy(rk.original)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        greedy(rk(x)).backward()
    greedy(twin(x)).backward()
    assert_same_gradients(rk.original, twin)


@pytest.mark.parametrize("how", [{"split": True}, {"split": "exact"}, {"compile": True}])
def test_steps_with_pieces_have_room_for_a_loss_that_takes_more(how: dict[str, Any]) -> None:
    rk, stepper, x, memory = planned(2.2, 512, **how)
    first, again = copy.deepcopy(rk.original), copy.deepcopy(rk.original)
    assert max(peaks(rk, stepper, x, greedy, 3)) <= memory
    assert part(rk)[1] > 4 * x.nbytes
    loose = rockmate.Rockmate(first, x, 1 << 40, cost="flops", **how)
    if "compile" not in how:  # whose bits are its own: see tests/compiled
        tight = rockmate.Rockmate(again, x, memory=memory, optimizer=stepper, cost="flops", **how)
        for _ in range(3):
            greedy(loose(x)).backward()
            greedy(tight(x)).backward()
        for a, b in zip(first.parameters(), again.parameters(), strict=True):
            if how["split"] == "exact":
                assert torch.equal(a.grad, b.grad)
            else:  # sums over pieces, in another order
                assert torch.allclose(
                    a.grad, b.grad, rtol=1e-3, atol=1e-3 * float(a.grad.abs().max())
                )


@pytest.mark.parametrize("name", LOSSES)
def test_steps_are_those_of_plain_training(name: str) -> None:
    rk, _, x, _ = planned(1.7, 1024)
    twin = copy.deepcopy(rk.original)
    for _ in range(3):  # seen in the first, planned anew in the second
        LOSSES[name](rk(x)).backward()
        LOSSES[name](twin(x)).backward()
        assert_same_gradients(rk.original, twin)
    loaded = pickle.loads(pickle.dumps(rk))
    loaded(x).mean().backward()
    assert loaded.memory.parts == rk.memory.parts, "copies know what was seen"


def test_other_calls_leave_as_much_in_proportion() -> None:
    rk, _, x, _ = planned(2.0)
    rk(x).square().mean().backward()
    assert part(rk)[0].endswith("as seen")
    for call in (x, torch.cat([x, x])):
        _, memory = rk._rockmate.for_call(((call,), {}))
        found = next(p.size_bytes for p in memory.parts if p.name.endswith("as seen"))
        assert found == -(-part(rk)[1] * call.nbytes // x.nbytes)


def an_own_mode(rk: Any, x: Tensor) -> None:
    with torch.utils.flop_counter.FlopCounterMode(display=False) as mode:
        y = rk(x)
    y.mean().backward()
    assert mode.get_total_flops() >= 0


def no_backward(rk: Any, x: Tensor) -> None:
    rk(x).mean()
    with torch.no_grad():
        rk(x)


@pytest.mark.parametrize("use", [an_own_mode, no_backward])
def test_what_cannot_be_seen_is_seen_later_and_nothing_stays(use: Any) -> None:
    rk, _, x, _ = planned(1.3)
    use(rk, x)
    rk.zero_grad()
    with torch.no_grad():
        rk(x)
    assert not _get_current_dispatch_mode_stack()
    assert not part(rk)[0].endswith("as seen")
    rk(x).mean().backward()
    assert part(rk)[0].endswith("as seen")


def test_of_two_forwards_the_last_is_seen() -> None:
    rk, _, x, _ = planned(2.0)
    (rk(x).mean() + rk(x).abs().square().mean()).backward()
    assert part(rk)[0].endswith("as seen")
    assert x.nbytes < part(rk)[1] <= 5 * x.nbytes
    assert not _get_current_dispatch_mode_stack()


def test_a_reserve_and_a_loss_inside_are_not_watched() -> None:
    rk, _, x, _ = planned(1.3, reserve=1 << 20)
    rk(x).mean().backward()
    assert part(rk) == ("loss outside of the module", 1 << 20)
    rk, _, x, _ = planned(1.3, loss=LOSSES["mean"])
    rk(x)[0].backward()
    assert "loss" not in str(rk.memory)
    assert not _get_current_dispatch_mode_stack()


class Decides(nn.Module):
    """A root that cannot be recorded: it is planned by its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = x + y if y.sum().item() > -1e9 else x - y
        return x


def test_blocks_of_a_root_that_decides_leave_what_was_seen() -> None:
    torch.manual_seed(0)
    model, x = Decides(), torch.randn(512, 64)
    twin = copy.deepcopy(model)
    stepper = torch.optim.AdamW(model.parameters())
    how: dict[str, Any] = {"optimizer": stepper, "cost": "flops"}
    with pytest.raises(rockmate.InfeasibleBudgetError) as refused:
        rockmate.Rockmate(model, x, memory=1000, **how)
    memory = refused.value.minimum_bytes
    rk = rockmate.Rockmate(model, x, memory=memory, **how)
    before = rk._rockmate.by_blocks.report
    for _ in range(3):  # seen in the first, planned anew in the second
        LOSSES["mean"](rk(x)).backward()
        LOSSES["mean"](twin(x)).backward()
        assert_same_gradients(model, twin)
    after = rk._rockmate.by_blocks.report
    assert part(rk)[0].endswith("as seen")
    assert before.overhead > after.overhead
    assert after.budget_bytes - before.budget_bytes == 4 * x.nbytes - part(rk)[1]
    assert max(peaks(rk, stepper, x, LOSSES["mean"], 2)) <= memory


def by_blocks(share: float, batch: int, **more: Any) -> tuple[Any, nn.Module, Any, Tensor, int]:
    """Return a model planned by its blocks, a twin, and what the plan is."""
    torch.manual_seed(0)
    model, x = network(), torch.randn(batch, 64)
    twin, stepper = copy.deepcopy(model), torch.optim.AdamW(model.parameters())
    how: dict[str, Any] = {"optimizer": stepper, "cost": "flops", "compare": False, "cache": False}
    with pytest.raises(rockmate.InfeasibleBudgetError) as refused:
        rockmate.apply_to_blocks(model, x, memory=1000, **how, **more)
    memory = int(share * refused.value.minimum_bytes)
    plan = rockmate.apply_to_blocks(model, x, memory=memory, **how, **more)
    return plan, twin, (model, stepper), x, memory


@pytest.mark.parametrize(("name", "share"), [("mean", 1.1), ("as expected", 1.1), ("greedy", 1.7)])
def test_blocks_are_chosen_again_for_the_loss_that_was_seen(name: str, share: float) -> None:
    plan, twin, (model, stepper), x, memory = by_blocks(share, 1024)
    before, loss = (plan.overhead, plan.budget_bytes), LOSSES[name]
    for _ in range(3):
        loss(model(x)).backward()
        loss(twin(x)).backward()
        assert_same_gradients(model, twin)
    assert part(plan)[0].endswith("as seen")
    assert plan.budget_bytes - before[1] == 4 * x.nbytes - part(plan)[1]
    assert plan.overhead < before[0] or name != "mean"
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not _get_current_dispatch_mode_stack()
    assert max(peaks(model, stepper, x, loss, 2)) <= memory


def test_the_first_step_of_blocks_has_room_for_any_loss() -> None:
    plan, _, (model, stepper), x, memory = by_blocks(1.5, 1024)
    before, kept = plan.peak_bytes, [block._rockmate.planned.plan for block in model]
    first = peaks(model, stepper, x, greedy, 1)[0]
    assert first <= memory < first + before - max(p.peak_bytes for p in kept)


def test_a_saved_plan_of_blocks_knows_the_loss(tmp_path: Path) -> None:
    plan, twin, (model, _), x, memory = by_blocks(1.1, 256)
    for _ in range(2):
        model(x).mean().backward()
    plan.save_plan(tmp_path / "plan.json")
    how: dict[str, Any] = {"optimizer": "adamw", "compare": False}
    again = rockmate.apply_to_blocks(twin, x, memory=memory, plan=tmp_path / "plan.json", **how)
    assert again.memory is not None
    assert again.memory.budget_bytes == plan.budget_bytes == again.budget_bytes
    assert [row.kept_bytes for row in again.rows] == [row.kept_bytes for row in plan.rows]
    assert not twin._forward_hooks


def test_a_saved_plan_knows_the_loss(tmp_path: Path) -> None:
    rk, stepper, x, memory = planned()
    peaks(rk, stepper, x, LOSSES["mean"], 2)
    rk.save_plan(tmp_path / "plan.json")
    stepper.zero_grad()
    how: dict[str, Any] = {"optimizer": stepper, "plan": tmp_path / "plan.json"}
    again = rockmate.Rockmate(network(), x, memory=memory, **how)
    assert part(again) == part(rk)
    assert again.plan.peak_bytes == rk._rockmate.plan_file().plans[0].plan.peak_bytes
    assert max(peaks(again, torch.optim.SGD(again.parameters()), x, LOSSES["mean"], 1)) <= memory


def test_a_watch_of_blocks_is_taken_off_and_not_copied() -> None:
    _, _, (model, _), x, _ = by_blocks(1.1, 256)
    model(x).mean()  # it is open
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    other(x).mean().backward()
    rockmate.remove(model)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    model(x).mean().backward()
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler
@pytest.mark.parametrize("what", ["blocks", "whole"])
def test_a_loss_of_compiled_code_is_not_watched_on_the_host(what: str) -> None:
    """A mode that is entered or left within compiled code leaves torch in a broken state."""
    if what == "whole":
        model, _, x, _ = planned()
        twin = copy.deepcopy(model.original)
    else:
        _, twin, (model, _), x, _ = by_blocks(1.1, 256)
    compiled = torch.compile(model, backend="eager")
    for _ in range(5):
        compiled(x).square().mean().backward()
        twin(x).square().mean().backward()
        assert not _get_current_dispatch_mode_stack()
    assert_same_gradients(model, twin)
