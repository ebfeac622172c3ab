"""Gradients arrive as the user's loss makes them, and leave as plain PyTorch hands them over."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients, eager_copy
from rkgb.engine import trace_memory
from rockmate import InfeasibleBudgetError
from rockmate.comparison.eager import seed_backward
from runs.planned import wrap
from zoo.nets import network


class Two(nn.Module):
    """Two results, of which one goes on into the other."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.head = nn.Linear(24, 6)
        self.unused = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.body(x)
        return y, self.head(y), self.unused(y)


class ChannelsLast(nn.Module):
    """A result that is not contiguous, and to which a mean gives contiguous gradients."""

    def __init__(self) -> None:
        super().__init__()
        parts = (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        layers = (copy.deepcopy(part) for _ in range(4) for part in parts)
        self.body = nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result


LOSSES: dict[str, Callable[[tuple[Tensor, ...]], Tensor]] = {
    "expanded gradients": lambda out: out[0].sum() + out[1].mean() + out[2].sum(),
    "a transposed one": lambda out: (out[0].t() * torch.arange(8.0)).sum() + out[1].sum(),
    "a part of a result": lambda out: out[0][:, ::3].square().sum() + out[2].square().sum(),
    "the first alone": lambda out: out[0].square().sum(),
    "the second alone": lambda out: out[1].square().sum(),
    "all of them": lambda out: sum((t.square().sum() for t in out), torch.zeros(())),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_every_kind_of_gradient_gives_eagers_bits(loss: str) -> None:
    torch.manual_seed(0)
    model = Two()
    twin = eager_copy(model)
    x = torch.randn(8, 12)
    wrapped = wrap(model, x, "1MiB")
    for _ in range(3):  # the second and third step were recorded with such gradients
        LOSSES[loss](wrapped(x)).backward()
        LOSSES[loss](twin(x)).backward()
        assert_same_gradients(model, twin)


def test_kinds_of_gradients_may_change_from_step_to_step() -> None:
    torch.manual_seed(0)
    model = Two()
    twin = eager_copy(model)
    x = torch.randn(8, 12)
    wrapped = wrap(model, x, "1MiB")
    for name in (*LOSSES, *reversed(LOSSES)):
        LOSSES[name](wrapped(x)).backward()
        LOSSES[name](twin(x)).backward()
        assert_same_gradients(model, twin)


class Headed(nn.Module):
    """Several results of one body; what each keeps for its backward no other one reads."""

    def __init__(self, heads: int, *, shared: bool = False) -> None:
        super().__init__()
        layers = (part for _ in range(4) for part in (nn.Linear(32, 32), nn.GELU()))
        self.body = nn.Sequential(*layers)
        made = [
            nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.GELU(), nn.Linear(32, 64))
            for _ in range(heads)
        ]
        self.heads = nn.ModuleList(made[:1] * heads if shared else made)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.body(x)
        return tuple(head(y * (1 + place)) for place, head in enumerate(self.heads))


class WithLoss(nn.Module):
    """The loss beside what it is computed from, as models of Hugging Face return them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Headed(1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        (logits,) = self.net(x)
        return {"loss": logits.square().mean(), "logits": logits}


def only(*places: int) -> Callable[[tuple[Tensor, ...]], list[Tensor]]:
    return lambda out: [out[place] for place in places]


STEPS_OF: dict[str, tuple[Callable[[], nn.Module], list[Callable[[Any], list[Tensor]]]]] = {
    "the loss alone": (WithLoss, [lambda out: [out["loss"]]]),
    "expanded": (lambda: Headed(1), [lambda out: [out[0].sum()]]),
    "one of many": (lambda: Headed(5), [only(4), only(0), only(0, 4), only(0, 1, 2, 3, 4)]),
    "some of many": (lambda: Headed(4), [only(0, 1, 2), only(1, 2), only(0, 2, 3)]),
    "one of two": (lambda: Headed(2), [only(1), only(0), only(0, 1)]),
    "a shared one": (lambda: Headed(2, shared=True), [only(1), only(0, 1), only(0)]),
    "a shared one of many": (lambda: Headed(5, shared=True), [only(4), only(0), only(*range(5))]),
}


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS_OF)
@pytest.mark.parametrize("budget", [0.5, pytest.param(1.0, marks=pytest.mark.nightly)])
def test_gradients_that_nobody_foresaw_come_within_the_budget(name: str, budget: float) -> None:
    make, kinds = STEPS_OF[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(256, 32)
    twin = eager_copy(model)
    try:
        wrapped = wrap(model, x, budget)
    except InfeasibleBudgetError as error:
        wrapped = wrap(model, x, error.minimum_bytes)
    own = {*map(id, (*model.parameters(), *twin.parameters()))}
    for chosen in (*kinds, *kinds):
        for p in (*model.parameters(), *twin.parameters()):
            p.grad = torch.zeros_like(p)  # gradients that all wait would count

        def step(_: Any = None, chosen: Callable[[Any], list[Tensor]] = chosen) -> None:
            seed_backward(chosen(wrapped(x)), own)  # a loss has temporaries of its own

        gc.collect()
        torch.manual_seed(1)
        peak = trace_memory(step, x.device).peak_bytes
        assert peak <= wrapped.budget_bytes
        torch.manual_seed(1)
        seed_backward(chosen(twin(x)), own)
        assert_same_gradients(model, twin)


@pytest.mark.parametrize("reduce", [Tensor.mean, Tensor.sum])
def test_a_mean_of_what_is_not_contiguous_is_foreseen(
    reduce: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = ChannelsLast()
    x = torch.randn(4, 8, 12, 12).contiguous(memory_format=torch.channels_last)
    twin = eager_copy(model)
    wrapped = wrap(model, x, 0.6)
    caplog.clear()
    for _ in range(2):
        reduce(wrapped(x)).backward()
        reduce(twin(x)).backward()
        assert_same_gradients(model, twin)
    assert not caplog.records  # neither is recorded in a step, above its budget


class Handing(torch.autograd.Function):
    """A loss that hands back a gradient in a layout of its own, and keeps none of it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, make: Callable[[torch.Size], Tensor]) -> Tensor:
        ctx.shape, ctx.make = y.shape, make
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        torch.manual_seed(1)
        return ctx.make(ctx.shape), None


class Ending(nn.Module):
    def __init__(self, end: Callable[[], nn.Module]) -> None:
        super().__init__()
        body = nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 512), nn.Tanh()
        self.body = nn.Sequential(*body, end())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).view(16, -1)  # type: ignore[no-any-return]


LAYOUTS: dict[str, Callable[[torch.Size], Tensor]] = {
    "transposed": lambda shape: torch.randn(*shape[::-1]).t(),
    "with gaps": lambda shape: torch.randn(shape[0], 2 * shape[1])[:, ::2],
    "rows": lambda shape: torch.randn(shape[1]).expand(shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("end", "untold"),
    [(partial(nn.Softmax, -1), ("transposed", "rows")), (partial(nn.LayerNorm, 512), ("rows",))],
)
def test_gradients_in_another_layout_stay_in_the_budget_or_are_told(
    end: Callable[[], nn.Module], untold: tuple[str, ...], layout: str
) -> None:
    """Their copies need another plan of the softmax; before the LayerNorm no plan has room."""
    torch.manual_seed(0)
    model, x = Ending(end), torch.randn(256, 32)
    twin = eager_copy(model)
    with pytest.raises(InfeasibleBudgetError) as error:
        wrap(model, x, 1000)
    wrapped = wrap(model, x, error.value.minimum_bytes)

    def step(net: nn.Module) -> None:
        y = net(x)  # held to the end, as the budget allows
        Handing.apply(y, LAYOUTS[layout]).backward()  # type: ignore[no-untyped-call]

    said = pytest.warns(RuntimeWarning, match="in another layout than it was planned for")
    with contextlib.nullcontext() if layout in untold else said:
        step(wrapped)  # it records and plans
        peak = trace_memory(lambda _: step(wrapped), x.device).peak_bytes
    for _ in range(2):
        step(twin)
    assert_same_gradients(model, twin)
    # The loss and its gradient are numbers.
    assert (peak <= wrapped.budget_bytes + 16) is (layout in untold)


class LossAndLogits(nn.Module):
    """As Hugging Face's models: trained on the first of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(24, 24) for _ in range(12)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layers(x).tanh()
        return logits.square().mean(), logits


@pytest.mark.parametrize("budget", [1.0, 0.6])
def test_gradients_of_a_loss_alone_wait_for_each_other_where_there_is_room(budget: float) -> None:
    torch.manual_seed(0)
    model, x = LossAndLogits(), torch.randn(64, 24)
    twin = eager_copy(model)
    wrapped = wrap(model, x, budget)

    def step(_span: Any = None) -> None:
        wrapped(x)[0].backward()

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        assert trace_memory(step, x.device).peak_bytes <= wrapped.budget_bytes
    twin(x)[0].backward()
    assert_same_gradients(model, twin)
    latest = wrapped._rockmate.first.executor.latest
    assert latest is wrapped._rockmate.first.executor.planned
    assert sum(len(give.gradients) for give in latest.program.gives) == 24
    assert len(latest.program.gives) < 12, "several layers hand their gradients over at once"


def test_a_backward_inside_an_autocast_region_is_one_of_its_own() -> None:
    model, sample = network("mixer")
    twin = eager_copy(model)
    wrapped = wrap(model, sample, "1GiB")
    for seed in range(2):
        for module in (wrapped, twin):
            torch.manual_seed(seed)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                module(*sample).backward()
        assert_same_gradients(model, twin)


class Outside(nn.Module):
    """A weight that is used twice, and once more by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.slow
def test_each_use_of_a_shared_parameter_is_handed_over_by_itself() -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        model = Outside()
        twin = eager_copy(model)
        x = torch.randn(8, 16)
        wrapped = wrap(model, x, "1MiB")
        for module, call in ((model, wrapped), (twin, twin)):
            weight = module.first.weight
            loss = (weight * 0.37).sin().sum() + call(x).square().sum() + weight.pow(3).sum()
            loss.backward()
        assert_same_gradients(model, twin)


def test_gradients_are_accumulated_in_eagers_order() -> None:
    model, sample = network("gpt")
    twin = eager_copy(model)
    wrapped = wrap(model, sample, 1.0)
    seen: list[list[str]] = []
    for module in (model, twin):
        order: list[str] = []
        seen.append(order)
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, n=name, o=order: o.append(n))
    wrapped(*sample).backward()
    twin(*sample).backward()
    assert seen[0] == seen[1]


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.abs()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.abs() * 3  # not the derivative: only this backward gives this


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + Squared.apply(torch.dropout(layer(x), 0.1, True))
        return x


@pytest.mark.parametrize("budget", [1.0, 0.7])
def test_custom_functions_in_torch_operations_run_as_they_are(budget: float) -> None:
    torch.manual_seed(0)
    model = WithFunction()
    twin = eager_copy(model)
    x = torch.randn(4096, 16)
    wrapped = wrap(model, x, budget)
    assert (wrapped.plan.overhead > 0) == (budget < 1)
    for _ in range(2):
        state = torch.get_rng_state()
        wrapped(x).square().sum().backward()
        torch.set_rng_state(state)
        twin(x).square().sum().backward()
        assert_same_gradients(model, twin)


class Loop(nn.Module):
    """A cell in a loop over time; the loss is on all its states."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = x.new_zeros(x.shape[0], 16)
        if isinstance(self.cell, nn.LSTMCell):
            state = (state, state)
        states = []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return self.out(torch.stack(states, 1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
@pytest.mark.parametrize("budget", [1.0, 0.75])
def test_cells_in_loops_give_eagers_bits(kind: type[nn.Module], budget: float) -> None:
    torch.manual_seed(0)
    model = Loop(kind(8, 16))
    twin = eager_copy(model)
    x = torch.randn(64, 8, 8)
    wrapped = wrap(model, x, budget)
    for _ in range(2):
        wrapped(x).square().mean().backward()
        twin(x).square().mean().backward()
        assert_same_gradients(model, twin)


def test_several_forwards_before_their_backwards() -> None:
    model, sample = network("resnet")
    twin = eager_copy(model)
    wrapped = wrap(model, sample, 0.9)
    for module in (wrapped, twin):
        torch.manual_seed(0)
        losses = [module(*sample) for _ in range(3)]
        for loss in reversed(losses):
            loss.backward()
        sum(module(*sample) for _ in range(2)).backward()
    assert_same_gradients(model, twin)


def test_nothing_is_kept_alive_by_a_finished_or_forgotten_step() -> None:
    model, sample = network("mixer")
    wrapped = wrap(model, sample, 0.9)
    images, labels = sample
    gc.collect()
    gc.disable()
    try:
        for finish in (True, False, True):
            mine = images.clone().requires_grad_()
            loss = wrapped(images * 1, labels)
            watched = weakref.ref(loss)
            if finish:
                loss.backward()
            del loss, mine
            assert watched() is None
        values = torch.autograd.grad(wrapped(images, labels), [next(model.parameters())])
        assert values[0] is not None
        alive = weakref.ref(wrapped(images, labels).grad_fn)
        assert alive() is None
    finally:
        gc.enable()


def test_the_program_can_be_read() -> None:
    model, sample = network("mixer")
    source = wrap(model, sample, 0.6).plan.source()
    assert source.startswith("def forward(externals):")
    assert "def backward(saved, tangents):" in source
    assert " again: " in source, "a plan below the plain peak recomputes"
    path = next(name for name, _ in model.named_modules() if "." in name)
    assert f"({path.rpartition('.')[0]}" in source


def test_statistics_that_are_read_are_read_again_in_a_recomputation() -> None:
    """BatchNorm in eval mode inside a training model: recomputed with its statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *[
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            for _ in range(6)
        ]
    )
    for layer in model[::2]:
        layer[1].eval()
        layer[1].running_mean.normal_()
    twin = eager_copy(model)
    for layer in twin[::2]:
        layer[1].eval()
    x = torch.randn(8, 8, 16, 16)
    wrapped = wrap(model, x, 0.6)
    assert wrapped.plan.overhead > 0
    for _ in range(2):
        wrapped(x).square().mean().backward()
        twin(x).square().mean().backward()
        assert_same_gradients(model, twin)
    for (name, ours), (_, theirs) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name


class Recurrent(nn.Module):
    """Its layers are kernels that make a workspace for their backward only in grad mode."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(12, 12)
        self.layers = nn.LSTM(12, 8, batch_first=True, num_layers=2, bidirectional=True)
        self.head = nn.Linear(16, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layers(torch.tanh(self.start(x)))[0]
        return self.head(hidden), hidden


@pytest.mark.parametrize("budget", [1.0, 0.7])
def test_a_forward_that_runs_again_keeps_what_its_kernels_keep_in_grad_mode(budget: float) -> None:
    torch.manual_seed(0)
    model = Recurrent()
    twin = eager_copy(model)
    x = torch.randn(4, 6, 12)
    wrapped = wrap(model, x, budget)
    for places in ((0, 1), (0,), (1,), (0, 1)):
        for module in (wrapped, twin):
            module.zero_grad()
            made = module(x)
            torch.stack([made[place].square().mean() for place in places]).sum().backward()
        assert_same_gradients(model, twin)
