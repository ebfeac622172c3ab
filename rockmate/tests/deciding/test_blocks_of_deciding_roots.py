"""Blocks of roots that decide: called more often or otherwise than was planned, exact and told."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oracles.decisions import assert_steps_like
from oracles.training import assert_same_gradients, measured_peak_bytes
from rkgb.engine import trace_memory
from rockmate import InfeasibleBudgetError, Rockmate
from zoo.deciding import WIDTH, Layer, Repeated, Scaled, rows


def test_more_calls_than_were_planned_keep_nothing_and_are_told() -> None:
    torch.manual_seed(0)
    model = Repeated().train()
    twin = copy.deepcopy(model)
    rk = Rockmate(model, rows(0), 0.8, cost="flops")
    assert len(rk.plan.rows) == 3
    assert "layer (call 2)" in str(rk.plan)
    assert_steps_like(rk, twin, rows, steps=2)
    rk.times = twin.times = 5
    with pytest.warns(RuntimeWarning, match="called 4 times in this step, and 3 calls"):
        assert_steps_like(rk, twin, rows, steps=1)
    assert_steps_like(rk, twin, rows, steps=1)
    rk.times = twin.times = 1
    assert_steps_like(rk, twin, rows, steps=1)


class MoreOutside(Repeated):
    """Computes more between its layers where a value says so."""

    def forward(self, x: Tensor) -> Tensor:
        times = self.times if random.random() < 2 else 0
        for _ in range(3):
            x = x + self.layer(x)
            for _ in range(times - 3):
                x = torch.tanh(x)
        return x.square().mean()


def test_more_outside_of_blocks_than_was_planned_is_told() -> None:
    torch.manual_seed(0)
    model = MoreOutside().train()
    twin = copy.deepcopy(model)
    rk = Rockmate(model, rows(0), 0.8, cost="flops")
    assert_steps_like(rk, twin, rows, steps=2)  # warnings are errors
    rk.times = twin.times = 5
    with pytest.warns(RuntimeWarning, match=r"outside of its blocks .* 5 were planned"):
        assert_steps_like(rk, twin, rows, steps=1)


def test_an_argument_that_the_root_changes_after_a_call_is_found() -> None:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.late = nn.ModuleList(Layer() for _ in range(3)), False

        def forward(self, x: Tensor) -> Tensor:
            kept = []
            for layer in self.layers:
                if random.random() < 2:
                    kept.append(x)
                    x = x + layer(x)
            loss = x.square().mean()
            if self.late:
                with torch.no_grad():
                    kept[1].add_(1)
            return loss

    torch.manual_seed(0)
    model = Changed().train()
    rk = Rockmate(model, rows(0), 0.6, cost="flops")
    rk.late = True
    loss = rk(rows(1))
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace"):
        loss.backward()


class Checkpointed(nn.Module):
    """A root that decides by a value, and puts its blocks into checkpoints."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 16))
            for _ in range(6)
        )
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if x.mean() < 100:
                x = x + checkpoint(block, x, use_reentrant=self.is_reentrant)
        return x


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints_around_blocks_are_the_plans_to_decide(is_reentrant: bool) -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(is_reentrant), torch.randn(256, 16, requires_grad=True)
    twin = copy.deepcopy(model)
    rk = Rockmate(model, x, 0.5, cost="flops")
    assert rk.plan.measured_peak_bytes <= rk.budget_bytes
    for step in range(3):
        for net in (rk, twin):
            torch.manual_seed(step)
            net(x).square().mean().backward()
        assert_same_gradients(model, twin)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = nn.BatchNorm1d(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.count(x)
        return out


class Maps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


class Mixed(nn.Module):
    """Decides, and calls blocks in a row, of which one has a part that runs whole."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(())
        self.block1, self.block2 = Counts(), Maps()

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean.detach() + x.mean()
        x = x + self.mean
        out: Tensor = self.block2(self.block1(x))
        return out


def test_parts_that_run_whole_in_one_block_and_are_not_in_the_next() -> None:
    model = Mixed()
    plain = copy.deepcopy(model)
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(model, torch.randn(256, 8), 0.8)
    planned = Rockmate(model, torch.randn(256, 8), error.value.minimum_bytes)
    for _ in range(2):
        x = torch.randn(256, 8)
        outs = [one(x) for one in (planned, plain)]
        for out in outs:
            out.square().mean().backward()
        assert torch.equal(*outs)
        assert torch.equal(model.block2.linear.weight.grad, plain.block2.linear.weight.grad)


SHIFT = torch.full((1,), 2.0)
OTHERWISE: dict[str, tuple[Callable[[nn.Module], object], float]] = {
    "a number": (lambda net: None, 0.25),
    "an attribute": (lambda net: vars(net.get_submodule("layers.0")).update(gain=0.5), 1.0),
    "a kept tensor": (lambda net: vars(net.get_submodule("layers.1")).update(shift=SHIFT), 1.0),
    "frozen": (lambda net: net.get_parameter("layers.1.up.weight").requires_grad_(False), 1.0),
    "eval": (lambda net: net.get_submodule("layers.0").eval(), 1.0),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_blocks_that_are_called_otherwise_stay_in_the_budget(name: str) -> None:
    change, scale = OTHERWISE[name]
    torch.manual_seed(0)
    model, x = Scaled(), rows(0)
    twin = copy.deepcopy(model)
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(model, (x, 1.0), 1000, cost="flops")
    budget = error.value.minimum_bytes
    rk = Rockmate(model, (x, 1.0), budget, cost="flops")
    change(model)
    change(twin)
    for seed in range(3):
        for net in (rk, twin):
            torch.manual_seed(seed)
            net(x, scale).backward()
        assert_same_gradients(model, twin)
        model.zero_grad()
        twin.zero_grad()
    assert measured_peak_bytes(rk, (x, scale), grads_exist=True) <= budget


class Descending(nn.Module):
    """Runs a backward inside of its forward, as energy models and meta-learning do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        at = x.detach().requires_grad_()
        energy = torch.tanh(self.layer(at)).pow(3).sum()
        x = x - 0.1 * torch.autograd.grad(energy, at)[0]
        return x * torch.tanh(self.layer(x))


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Descending() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if x.mean() < 100:
                x = layer(x)
        return x.square().mean()


def test_blocks_with_a_backward_inside_are_recomputed() -> None:
    torch.manual_seed(0)
    model, x = Energy(), rows(0)
    twin = copy.deepcopy(model)
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(model, x, 1000, cost="flops")
    rk = Rockmate(model, x, error.value.minimum_bytes, cost="flops")
    assert rk.plan.overhead > 0
    for _ in range(2):
        for net in (rk, twin):
            net(x).backward()
        assert_same_gradients(model, twin)
    assert measured_peak_bytes(rk, (x,), grads_exist=True) <= error.value.minimum_bytes


def test_a_block_that_no_plan_fits_is_run_again_and_told() -> None:
    torch.manual_seed(0)
    model, x = Scaled(), rows(0)
    twin = copy.deepcopy(model)
    rk = Rockmate(model, (x, 1.0), 0.6, cost="flops")
    for net in (model, twin):
        vars(net.get_submodule("layers.1"))["copies"] = 16
    torch.manual_seed(0)
    with pytest.warns(RuntimeWarning, match="'layers.1' in Scaled is called otherwise .* may take"):
        rk(x, 1.0).backward()
    torch.manual_seed(0)
    twin(x, 1.0).backward()
    assert_same_gradients(model, twin)


def test_a_call_that_hooks_keep_from_running_again_is_told() -> None:
    torch.manual_seed(0)
    model, x = Scaled(), rows(0)
    twin = copy.deepcopy(model)
    rk = Rockmate(model, (x, 1.0), 0.6, cost="flops")
    for net in (model, twin):
        vars(net.get_submodule("layers.1"))["copies"] = 16

    def train(net: Any) -> None:
        for _ in range(2):
            torch.manual_seed(0)
            with torch.autograd.graph.save_on_cpu():
                loss = net(x, 1.0)
            loss.backward()

    train(twin)
    with pytest.warns(RuntimeWarning) as warned:
        train(rk)
    assert_same_gradients(model, twin)
    told = [str(w.message) for w in warned if "inside of hooks on saved tensors" in str(w.message)]
    assert len(told) == 1, "once"
    assert "'layers.1' in Scaled" in told[0]


class WithHidden(Scaled):
    """Returns its loss beside what it is computed from."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        for layer in self.layers:
            if x.mean() < 100:
                x = x + layer(x, scale)
        hidden = torch.tanh(x)
        return hidden.square().mean(), hidden


def test_outputs_beside_the_loss_that_are_held_over_the_budget_are_told() -> None:
    torch.manual_seed(0)
    model, x = WithHidden(), rows(0)
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(model, x, 1000, cost="flops")
    rk = Rockmate(model, x, error.value.minimum_bytes, cost="flops")
    rk(x)[0].backward()  # only the graph holds the other one
    outputs = rk(x)
    with pytest.warns(RuntimeWarning, match=r"beside its loss .* held .* more than the budget"):
        outputs[0].backward()
    outputs = rk(x)
    outputs[0].backward()  # told once


class CheckpointInside(nn.Module):
    """A root that decides by a value, whose blocks read `checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Inner() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if x.mean() < 100:
                x = x + layer(x)
        return x.square().mean()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(lambda t: torch.tanh(t) * t, self.up(x), use_reentrant=False)
        out: Tensor = self.down(inner)
        return out


def test_blocks_are_recorded_before_the_steps_that_are_metered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model, x = CheckpointInside(), rows(0)[:, :16]
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(model, x, 1000, cost="flops")
    budget = error.value.minimum_bytes
    with caplog.at_level("DEBUG", "rockmate"):
        rk = Rockmate(model, x, budget, cost="flops")
    told = [record.message for record in caplog.records]
    assert not [text for text in told if "another object" in text]
    assert not [text for text in told if "on already" in text]
    assert measured_peak_bytes(rk, (x,), grads_exist=True) <= budget


class Factor:
    @functools.cached_property
    def half(self) -> float:
        return 0.5


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = Factor()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor.half * self.scale + self.scale


class MadeOnce(nn.Module):
    """Keeps what it makes once in a dictionary outside, so that its root decides."""

    made: ClassVar[dict[str, Callable[[Tensor], Tensor]]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Shifted(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x) + x
        self.made.setdefault("half", lambda t: t * 0.5)
        return self.last(self.made["half"](x))


def test_what_a_measured_step_frees_of_earlier_ones_is_no_room() -> None:
    MadeOnce.made.clear()
    torch.manual_seed(0)
    x, how = torch.randn(64, 8), {"cost": "flops", "cache": False}
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(MadeOnce(), x, 1000, **how)
    for budget in (error.value.minimum_bytes, error.value.minimum_bytes + 1000):
        planned = Rockmate(MadeOnce(), x, budget, **how)

        def step(planned: Rockmate = planned) -> None:
            planned(x).sum().backward()

        for _ in range(3):  # a second look takes random states, too
            step()
        peak = trace_memory(lambda span: step(), torch.device("cpu")).peak_bytes
        assert 4096 < peak - 8 <= planned.budget_bytes  # the loss and its gradient are outside


class Returning(nn.Module):
    """Returns what its last layer returns, which is no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 1e9:
                x = x / 2
        return x


@pytest.mark.parametrize("loss", [Tensor.sum, Tensor.mean, lambda y: y.square().sum()])
def test_the_first_backward_of_a_sum_stays_within_the_budget(
    loss: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Returning().train()
    twin, batch = copy.deepcopy(model), rows(0)
    rk = Rockmate(model, batch, 0.7, cost="flops")

    def step(module: nn.Module) -> None:
        torch.manual_seed(1)
        loss(module(batch)).backward()

    gradients = sum(p.nbytes for p in model.parameters())
    peak = trace_memory(lambda _: step(rk), torch.device("cpu")).peak_bytes - gradients
    step(twin)
    assert "have arrived in a new way" not in caplog.text
    assert peak <= rk.budget_bytes
    assert_same_gradients(model, twin)


class Wrapped(nn.Module):
    """Wraps the forward of classes that derive from it, as layers of transformers do."""

    def __init_subclass__(cls) -> None:
        forward: Any = cls.forward

        @functools.wraps(forward)
        def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

        cls.forward = wrapper  # type: ignore[method-assign]


class WrappedLayer(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


def test_layers_whose_class_wraps_their_forward_are_blocks() -> None:
    torch.manual_seed(0)
    model = Returning().train()
    model.layers = nn.ModuleList(WrappedLayer() for _ in range(3))
    twin = copy.deepcopy(model)
    rk = Rockmate(model, rows(0), 0.7, cost="flops")
    assert [row.path for row in rk.plan.rows] == ["layers.0", "layers.1", "layers.2"]
    assert type(model.layers[0]) is WrappedLayer
    for module in (rk, twin):
        torch.manual_seed(1)
        module(rows(0)).square().mean().backward()
    assert_same_gradients(model, twin)
