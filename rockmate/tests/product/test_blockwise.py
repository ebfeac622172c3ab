"""Planned block by block: the whole step within one budget, and everything at borders as it was."""

from __future__ import annotations

import copy
import importlib
import itertools
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rockmate
from oracles.training import (
    assert_same_gradients,
    assert_trains_like,
    eager_copy,
    loss_of,
    measured_peak_bytes,
)
from rkgb.engine import trace_memory
from rockmate import BlocksPlan, InfeasibleBudgetError, Rockmate, UnsupportedModuleError
from rockmate.blockwise.rehearsal import find_what_changes
from zoo.nets import network


def planned(
    name: str = "gpt", budget: Any = 0.6, **options: Any
) -> tuple[Any, Any, Any, BlocksPlan]:
    """Return a network planned block by block, an eager copy, the sample and the plan."""
    model, sample = network(name)
    twin = eager_copy(model)
    plan = rockmate.apply_to_blocks(
        model, sample, budget, **{"cost": "flops", "compare": False, **options}
    )
    return model, twin, sample, plan


def test_blocks_are_recorded_once_for_all_options(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []

    def record(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorded.append(type(model).__name__)
        return original(model, *args, **kwargs)

    request = importlib.import_module("rockmate.requests.request")
    original = request.record
    monkeypatch.setattr(request, "record", record)
    model, twin, sample, plan = planned("gpt", 0.8)
    assert (
        len({row.kept_bytes for row in plan.rows}) > 1
    )  # blocks of one kind run otherwise than in the measured step
    assert len(recorded) == len(plan.rows) + 1  # the first one also stands for its kind
    assert_trains_like(model, twin, sample)


@pytest.mark.slow
def test_a_step_stays_in_the_budget_with_the_same_bits() -> None:
    model, twin, sample, plan = planned(compare=True)
    assert [row.path for row in plan.rows] == ["blocks.0", "blocks.1", "blocks.2"]
    assert_trains_like(model, twin, sample)
    peak = measured_peak_bytes(model, sample, grads_exist=True)
    assert peak == plan.measured_peak_bytes == plan.peak_bytes
    assert 0.9 * plan.budget_bytes < peak <= plan.budget_bytes
    assert peak < 0.62 * measured_peak_bytes(twin, sample, grads_exist=True)
    assert plan.overhead_ms > 0
    # What it costs that no block may look over its border is known, and printed.
    assert plan.restriction_ms is not None
    assert f"{100 * plan.restriction_ms / plan.base_time_ms:.2f} % of the blocks' time" in str(plan)
    assert "blocks.2" in str(plan)


def test_planning_leaves_the_model_as_it_was_and_is_undone() -> None:
    model, sample = network("gpt")
    twin = eager_copy(model)
    model.wte.weight.grad = torch.ones_like(model.wte.weight)
    called: list[str] = []
    model.ln.weight.register_post_accumulate_grad_hook(lambda _: called.append("optimizer"))
    state = torch.get_rng_state()
    attributes = [dict(vars(module)) for module in model.modules()]
    rockmate.apply_to_blocks(model, sample, 0.7, cost="flops", compare=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.wte.weight.grad, torch.ones_like(model.wte.weight))
    assert model.ln.weight.grad is None
    assert not called
    assert list(model.state_dict()) == list(twin.state_dict())
    assert type(model) is type(twin)
    assert isinstance(model.blocks[0], Rockmate)
    assert isinstance(model.blocks[0], type(twin.blocks[0]))
    assert rockmate.remove(model) is model
    assert [type(m) for m in model.modules()] == [type(m) for m in twin.modules()]
    assert [dict(vars(module)) for module in model.modules()] == attributes
    model.zero_grad()
    assert_trains_like(model, twin, sample)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler
@pytest.mark.parametrize("order", ["planned first", "compiled first"])
def test_blocks_may_be_compiled(order: str) -> None:
    """Around a planned block, torch.compile runs it as it is; taken off and put on, it stays so."""
    model, sample = network("gpt")
    twin = eager_copy(model)
    if order == "compiled first":
        for block in model.blocks:
            block.compile(backend="eager")
    rockmate.apply_to_blocks(model, sample, 0.6, cost="flops", compare=False)
    if order == "planned first":
        for block in model.blocks:
            block.compile(backend="eager")
    assert_trains_like(model, twin, sample)


def test_hooks_on_blocks_fire_as_without() -> None:
    model, twin, sample, _ = planned(self_test=False)
    counts = []
    for net in (twin, model):
        fired: list[str] = []
        for place, block in enumerate(net.blocks):
            block.register_forward_pre_hook(lambda *_, f=fired, p=place: f.append(f"pre {p}"))
            block.register_forward_hook(lambda *_, f=fired, p=place: f.append(f"forward {p}"))
            block.register_full_backward_hook(lambda *_, f=fired, p=place: f.append(f"back {p}"))
        net(*sample).backward()
        counts.append(fired)
    assert counts[0] == counts[1]
    assert len(counts[0]) == 9


def test_other_calls_are_planned_within_the_limits_of_each_block() -> None:
    model, twin, sample, plan = planned(self_test=False)
    smaller = tuple(t[:3] for t in sample)
    assert_trains_like(model, twin, smaller)
    assert [len(block.plans) for block in model.blocks] == [2, 2, 2]
    assert measured_peak_bytes(model, smaller, grads_exist=True) <= plan.budget_bytes
    with torch.no_grad():
        torch.manual_seed(1)
        loss = model(*sample)
        torch.manual_seed(1)
        assert torch.equal(loss, twin(*sample))


@pytest.mark.slow
def test_copies_keep_what_was_planned() -> None:
    model, twin, sample, _ = planned(self_test=False)
    other = copy.deepcopy(model)
    assert all(isinstance(block, Rockmate) for block in other.blocks)
    assert_trains_like(other, twin, sample)


@pytest.mark.slow
def test_blocks_of_many_classes() -> None:
    model, twin, sample, plan = planned("resnet", 0.8)
    assert [row.path for row in plan.rows] == ["stages.0", "stages.1", "stages.2"]
    assert_trains_like(model, twin, sample)
    assert measured_peak_bytes(model, sample, grads_exist=True) <= plan.budget_bytes


@pytest.mark.slow
def test_named_blocks() -> None:
    by_class = planned("gpt", 0.9, blocks=["Attention"], self_test=False)[3]
    assert [row.path for row in by_class.rows] == [f"blocks.{i}.attn" for i in range(3)]
    by_path = planned("gpt", 0.9, blocks=["blocks.1", "blocks.0.mlp"], self_test=False)[3]
    assert [row.path for row in by_path.rows] == ["blocks.0.mlp", "blocks.1"]


@pytest.mark.slow
def test_forwards_in_flight_count() -> None:
    model, sample = network("gpt")
    twin = eager_copy(model)
    alone = rockmate.apply_to_blocks(model, sample, 1.0, cost="flops", compare=False)
    budget = int(1.6 * alone.keeping_all_bytes)
    plan = rockmate.apply_to_blocks(model, sample, budget, cost="flops", compare=False, in_flight=3)
    assert plan.in_flight == 3
    assert plan.keeping_all_bytes > 2 * alone.keeping_all_bytes
    assert plan.overhead_ms > 0

    class Pipe(nn.Module):
        """Three micro-batches forward, then their backwards, as GPipe runs a stage."""

        def __init__(self, stage: nn.Module) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, *batch: Tensor) -> list[Tensor]:
            return [self.stage(*batch) for _ in range(3)]

    def gpipe(net: nn.Module) -> None:
        losses = [net(*sample) for _ in range(3)]
        for loss in losses:
            loss.backward()

    from rkgb.engine import trace_memory

    def peak_of(net: nn.Module) -> int:
        gpipe(net)
        return trace_memory(lambda _: gpipe(net), torch.device("cpu")).peak_bytes

    peak = peak_of(model)
    assert peak <= budget < peak_of(twin)
    model.zero_grad()
    twin.zero_grad()
    assert_trains_like(Pipe(model), Pipe(twin), sample)


@pytest.mark.slow
def test_what_is_refused_leaves_the_model_plain() -> None:
    model, sample = network("gpt")
    types = [type(m) for m in model.modules()]

    def refused(error: type[Exception], text: str, *more: Any, **options: Any) -> Exception:
        budget = more[0] if more else 0.7
        with pytest.raises(error, match=text) as caught:
            rockmate.apply_to_blocks(
                model, sample, budget, **{"cost": "flops", "compare": False, **options}
            )
        assert [type(m) for m in model.modules()] == types
        return caught.value

    error = refused(InfeasibleBudgetError, "planned module by module", 1000)
    assert isinstance(error, InfeasibleBudgetError)
    least = error.minimum_bytes
    refused(InfeasibleBudgetError, "planned module by module", least - 1)
    refused(UnsupportedModuleError, "no submodule at the path 'layers'", blocks=["layers"])
    refused(UnsupportedModuleError, "lies inside", blocks=["blocks.0", "blocks.0.mlp"])
    refused(ValueError, "in_flight", in_flight=0)
    model.gradient_checkpointing = True
    refused(UnsupportedModuleError, "gradient checkpointing is on")
    model.gradient_checkpointing = False
    plan = rockmate.apply_to_blocks(model, sample, least, cost="flops", compare=False)
    assert plan.peak_bytes <= least
    with pytest.raises(UnsupportedModuleError, match="no list of layers"):
        rockmate.apply_to_blocks(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4), 0.5)
    with pytest.raises(UnsupportedModuleError, match="planned as a whole"):
        rockmate.apply_to_blocks(Rockmate(nn.Linear(4, 4), torch.ones(2, 4), "1MiB"), sample, 0.5)


class Noting(nn.Module):
    """A block that notes in a global what it was called with, so that it runs whole."""

    seen: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.body()

    @staticmethod
    def body() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        Noting.seen.append(len(x))
        made: Tensor = self.inner(x)
        return made


def test_a_block_that_runs_whole_is_code_between_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    parts = [Noting.body() for _ in range(3)]
    model, x = nn.Sequential(parts[0], Noting(), *parts[1:]), torch.randn(64, 8)
    twin = eager_copy(model)
    plan = rockmate.apply_to_blocks(
        *(model, x, 0.9), blocks=["0", "1", "2", "3"], cost="flops", compare=False
    )
    assert "'1' (Noting) runs whole" in caplog.text
    assert [row.path for row in plan.rows] == ["0", "2", "3"]
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert not Noting.seen, "planning leaves a trace"
    for count in (64, 64, 16, 64):
        for net in (model, twin):
            net.zero_grad()
            loss_of(net(x[:count])).backward()
        assert_same_gradients(model, twin)
    assert Noting.seen == [n for count in (64, 64, 16, 64) for n in (count, count)]
    alone = nn.Sequential(nn.Linear(8, 8), Noting(), Noting())
    with pytest.raises(UnsupportedModuleError, match=r"none of the 2 blocks .* can be recorded"):
        rockmate.apply_to_blocks(alone, x, 0.9, blocks=["Noting"], cost="flops", compare=False)


CALLS: list[int] = []
COUNTS = {"calls": 0}
NUMBERS = itertools.count()


class Counting(nn.Module):
    """Code between the blocks notes its calls, outside of the module and in it."""

    def __init__(self, *, differentiates: bool = False) -> None:
        super().__init__()
        self.differentiates = differentiates
        self.layers = nn.ModuleList([Noting.body() for _ in range(3)])
        self.own, self.seen, self.numbers = 0, [0], iter(range(9))

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(len(x))
        if self.differentiates:
            z = x.detach().requires_grad_()
            x = x - torch.autograd.grad(z.square().sum(), z)[0]
        COUNTS["calls"] += 1
        self.own += 1
        self.seen.append(next(self.numbers) + next(NUMBERS))
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("differentiates", [False, True])
def test_planning_undoes_what_code_between_the_blocks_changes(differentiates: bool) -> None:
    model, x = Counting(differentiates=differentiates), torch.randn(64, 8)
    before = next(NUMBERS)
    rockmate.apply_to_blocks(model, x, 0.9, cost="flops", compare=False)
    assert not CALLS
    assert COUNTS == {"calls": 0}
    assert (model.own, model.seen, next(model.numbers)) == (0, [0], 0)
    assert next(NUMBERS) == before + 1


def test_a_first_look_at_the_code_saves_nothing() -> None:
    """A plain step may not fit into the memory that there is."""
    model, x = nn.Sequential(*(Noting.body() for _ in range(8))), torch.randn(512, 8)
    call, cpu = ((x,), {}), torch.device("cpu")
    plain = trace_memory(lambda _: loss_of(model(x)).backward(), cpu)
    looked = trace_memory(lambda _: find_what_changes(model, [call], cpu), cpu)
    assert looked.peak_bytes < plain.peak_bytes / 3


class Odd(nn.Module):
    """Blocks that are called twice, or in a checkpoint, or that write to their inputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        part = Writing() if kind == "writes" else nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.layers = nn.ModuleList([part, copy.deepcopy(part)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *(self.layers if self.kind == "twice" else ())):
            if "checkpoint" in self.kind:
                is_old = self.kind == "reentrant checkpoint"
                x = checkpoint(layer, x, use_reentrant=is_old)
            else:
                x = layer(x)
        return x


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.add_(1))  # its own input


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("twice", "called more than once"),
        ("writes", "Writing"),
        ("checkpoint", "'layers.0' is called inside of a checkpoint"),
        ("reentrant checkpoint", "outside of checkpoints"),
    ],
)
def test_blocks_that_cannot_be_planned(kind: str, text: str) -> None:
    model, x = Odd(kind), torch.ones(2, 4, requires_grad=kind == "reentrant checkpoint")
    types = [type(m) for m in model.modules()]
    with pytest.raises(Exception, match=text):
        rockmate.apply_to_blocks(model, x, 0.5, cost="flops", compare=False)
    assert [type(m) for m in model.modules()] == types
    assert all(p.grad is None for p in model.parameters())
    loss_of(model(x)).backward()
