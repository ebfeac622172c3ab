"""Roots that decide by values: their Python runs, and what they call is planned in one budget."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rockmate
from oracles.training import assert_same_gradients, measured_peak_bytes
from rockmate import InfeasibleBudgetError, PlanFileError, Rockmate

WIDTH, ROWS = 32, 64


class Layer(nn.Module):
    def __init_subclass__(cls) -> None:
        assert callable(cls.forward)  # libraries look at it while a class is made

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down, self.drop = nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Depth(nn.Module):
    """Layers are left out by Python's random numbers, as in stochastic depth and layerdrop."""

    def __init__(self, layers: int = 5, layerdrop: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.layerdrop = layerdrop

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or random.random() >= self.layerdrop:
                x = x + layer(x)
        return x.square().mean()


class Experts(nn.Module):
    """One expert for each row, found by a mask: its size is a value."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return (x + y).square().mean()


class Exit(nn.Module):
    """It leaves once its values are large enough."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.calls = 0  # what Python counts, and no plan takes for granted

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            x = x + layer(x)
            if float(x.detach().abs().max()) > 60:
                break
        return x.square().mean()


class Forcing(nn.Module):
    """Teacher forcing: one cell, called for every token."""

    def __init__(self, vocabulary: int = 20) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(vocabulary, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.zeros(len(tokens), WIDTH)
        token, loss = tokens[:, 0], torch.zeros(())
        for target in tokens[:, 1:].unbind(1):
            hidden = self.cell(self.embed(token), hidden)
            logits = self.out(hidden)
            loss = loss + F.cross_entropy(logits, target)
            token = target if random.random() < 0.5 else logits.argmax(-1)
        return loss


class Encoder(nn.Module):
    """What decides lies inside, in the largest part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Depth()
        self.before, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(torch.tanh(self.before(x)))[None])


class Nested(nn.Module):
    """The root decides, and what decides inside lies two modules deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Encoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x if random.random() < 0.5 else -x)


class Checked(nn.Module):
    """Layers that look at their own values, and are no chain of modules inside."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.up(x)).sin().cos() * torch.rand(())
            self.seen += 1
            if y.abs().max() > 1e3:
                y = y.clamp(-1e3, 1e3)
            return self.down(y)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.9:
                x = x + layer(x)
        return x.square().mean()


class Residual(nn.Module):
    """BatchNorm counts and in-place sums in layers that come or not."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(1, 4, 3, 1, 1), nn.BatchNorm1d(4)
            self.back = nn.Conv1d(4, 1, 3, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.back(F.relu(self.norm(self.conv(x)), inplace=True)).add_(x)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        for layer in self.layers:
            if float(torch.rand(())) < 0.8:
                x = layer(x)
        return x.square().mean()


def rows(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def tokens(step: int) -> Tensor:
    return torch.randint(0, 20, (16, 9), generator=torch.Generator().manual_seed(step))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "depth": (Depth, rows),
    "experts": (Experts, rows),
    "exit": (Exit, lambda step: rows(step) * (1 + 4 * (step % 3))),
    "forcing": (Forcing, tokens),
    "encoder": (Encoder, rows),
    "nested": (Nested, rows),
    "checked": (Checked, rows),
    "residual": (Residual, rows),
}


def seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)


def outcome(model: nn.Module, batch: Tensor, number: int) -> tuple[Tensor, Any]:
    seed(number)
    loss = model(batch)
    loss.backward()
    return loss.detach(), (random.getstate(), torch.get_rng_state().tolist())


def assert_steps_like(planned: nn.Module, twin: nn.Module, batches: Any, steps: int = 4) -> None:
    """Train both, with other decisions at every step, and compare what each step leaves."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (planned, twin)]
    for step in range(steps):
        ours, theirs = (outcome(m, batches(step), step) for m in (planned, twin))
        assert torch.equal(ours[0], theirs[0])
        assert ours[1] == theirs[1], "the random numbers after a step"
        for (name, mine), other in zip(planned.named_parameters(), twin.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), name
        if any(p.grad is not None for p in twin.parameters()):
            assert_same_gradients(planned, twin)
        for mine, other in zip(planned.buffers(), twin.buffers(), strict=True):
            assert torch.equal(mine, other)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=bool(step % 2))


def peak(model: nn.Module, batch: Tensor) -> int:
    """Return the peak of a step whose decisions are those of the sample's."""

    class Seeded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            seed(7)
            return self.model(x)  # type: ignore[no-any-return]

    return measured_peak_bytes(Seeded(), (batch,), grads_exist=True)


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
    assert "(test_deciding_roots.py:" in text.splitlines()[0]
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


class Repeated(nn.Module):
    """One layer, as often as a value says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.times = 3

    def forward(self, x: Tensor) -> Tensor:
        times = self.times if random.random() < 2 else 0
        for _ in range(times):
            x = x + self.layer(x)
        return x.square().mean()


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


class Scaling(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.copies = 1.0, 1
        self.shift = torch.zeros(1)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        many = super().forward(x.repeat(self.copies, 1)) * scale * self.gain + self.shift
        return many[: len(x)]


class Scaled(nn.Module):
    """Decides by a value, and hands a number on to its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaling() for _ in range(3))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for layer in self.layers:
            if x.mean() < 100:
                x = x + layer(x, scale)
        return x.square().mean()


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
