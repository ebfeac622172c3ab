"""Weights that a step uses several times: their gradients are added up as autograd adds them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from oracles.check_program import check_program
from oracles.training import eager_copy
from rkgb import InvalidGraphError
from rkgb.capture import make_B
from rkgb.engine import B_to_D, D_to_S, lower_step, runnable
from rkgb.graphs import SimplifiedGraph
from rkgb.run import Give, StepProgram, Sum
from rockmate import Rockmate
from rockmate.runtime.gradients.rails import Rail
from rockmate.runtime.gradients.shared_uses import SharedUses
from runs.planned import wrap

STEPS = 6  # the first few show whether gradients come from elsewhere


class Repeated(nn.Module):
    """Layers that are used again and again, in an order that is drawn."""

    def __init__(self, order: tuple[int, ...], width: int = 6) -> None:
        super().__init__()
        self.order = order
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        for place in self.order:
            x = torch.tanh(self.layers[place](x)) * self.scale
        return x


class Tied(nn.Module):
    """A weight that is used twice among many others."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))

    def forward(self, text: Tensor) -> Tensor:
        return self.layers(self.table(text)) @ self.table.weight.T


class Cells(nn.Module):
    """One recurrent cell over a sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[0])
        states = []
        for part in x.unbind():
            state = self.cell(part, state)
            states.append(state)
        return torch.stack(states)


Loss = Callable[[nn.Module, Tensor], Tensor]


def alone(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def used_later(model: nn.Module, x: Tensor) -> Tensor:
    """The gradients of the penalty come first."""
    return model(x).square().mean() + sum(p.pow(2).sum() for p in model.parameters())


def used_earlier(model: nn.Module, x: Tensor) -> Tensor:
    """The gradients of what is added to the input come last."""
    before = sum(p.pow(2).mean() for p in model.parameters())
    return model(x + before).square().mean()


def used_around(model: nn.Module, x: Tensor) -> Tensor:
    before = sum(p.pow(2).mean() for p in model.parameters())
    return used_later(model, x + before)


LOSSES = (alone, used_later, used_earlier, used_around)


def bits(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def step(model: nn.Module, x: Tensor, loss: Loss, keep: bool) -> list[Tensor]:
    if not keep:
        model.zero_grad()
    loss(model, x).backward()
    return bits(model)


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    assert all(map(torch.equal, ours, theirs))


def layouts_of(module: Rockmate, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return whether the rails of a step put later uses in sums."""
    found: list[bool] = []
    plain = Rail.carry

    def carry(self: Rail, step: object) -> None:
        found.append(self.layout.in_sums)
        plain(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(Rail, "carry", carry)
        module(x).square().mean().backward()
    return found


@pytest.mark.parametrize(
    ("loss", "fraction"), [*((loss, 1.0) for loss in LOSSES), (used_around, 0.7)]
)
def test_a_cell_over_time(loss: Loss, fraction: float) -> None:
    torch.manual_seed(0)
    model, x = Cells(6), torch.randn(5, 3, 6)
    eager = eager_copy(model)
    module = wrap(model, x, fraction)
    for i in range(STEPS):
        keep = i % 3 == 2  # gradients are added to those of the step before
        assert_same(step(module, x, loss, keep), step(eager, x, loss, keep))


@pytest.mark.slow
@settings(max_examples=5)
@given(
    order=st.lists(st.integers(0, 2), min_size=2, max_size=7).map(tuple),
    losses=st.lists(st.sampled_from(LOSSES), min_size=STEPS, max_size=STEPS + 2),
    frozen=st.sampled_from([None, 0]),
)
def test_uses_in_any_order_with_any_loss(
    order: tuple[int, ...], losses: list[Loss], frozen: int | None
) -> None:
    """Losses change after the first gradients have come from the module alone."""
    torch.manual_seed(1)
    model, x = Repeated(order), torch.randn(4, 6)
    if frozen is not None:
        model.layers[frozen].weight.requires_grad_(False)
    eager = eager_copy(model)
    module = wrap(model, x, 1.0)
    for i, loss in enumerate([alone] * 4 + losses):
        keep = i % 4 == 3
        assert_same(step(module, x, loss, keep), step(eager, x, loss, keep))


def test_sums_begin_once_nothing_has_come_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Cells(6), torch.randn(5, 3, 6)
    module = wrap(model, x, 1.0)
    for _ in range(4):
        step(module, x, alone, keep=False)
    assert layouts_of(module, x, monkeypatch) == [True]
    step(module, x, used_later, keep=False)
    assert layouts_of(module, x, monkeypatch) == [False]


def test_a_first_gradient_that_came_from_elsewhere_forbids_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, x = Cells(6), torch.randn(5, 3, 6)
    module = wrap(model, x, 1.0)
    for _ in range(6):
        step(module, x, used_later, keep=False)
    assert layouts_of(module, x, monkeypatch) == [False]


def record_addresses(register: Callable[..., object], tensor: Callable[..., Tensor]) -> list[int]:
    """Register a hook that writes down where a tensor lies, and goes after its first use."""
    found: list[int] = []

    def look(argument: Tensor) -> None:
        found.append(tensor(argument).data_ptr())
        handle.remove()

    handle: Any = register(look)
    return found


def test_autograd_takes_the_tensor_that_was_added_to() -> None:
    """It makes no copy: nothing but autograd holds the sum when it is whole."""
    torch.manual_seed(0)
    model, x = Cells(6), torch.randn(5, 3, 6)
    module = wrap(model, x, 1.0)
    for _ in range(5):
        module.zero_grad()
        loss = alone(module, x)
        sums = [record_addresses(p.register_hook, lambda g: g) for p in model.parameters()]
        hook = "register_post_accumulate_grad_hook"
        kept = [record_addresses(getattr(p, hook), lambda p: p.grad) for p in model.parameters()]
        loss.backward()
        assert sums == kept
        assert all(len(found) == 1 for found in kept)


def test_hooks_see_whole_sums_once() -> None:
    torch.manual_seed(0)
    model, x = Cells(6), torch.randn(5, 3, 6)
    eager = eager_copy(model)
    module = wrap(model, x, 1.0)
    seen: dict[tuple[nn.Module, str], list[Tensor]] = {}
    for net in (module, eager):
        for name, p in net.named_parameters():
            mine = seen[net, name] = []
            p.register_hook(lambda g, mine=mine: mine.append(g.clone()))
    for _ in range(STEPS):
        step(module, x, alone, keep=False)
        step(eager, x, alone, keep=False)
    for name, _ in eager.named_parameters():
        assert len(seen[module, name]) == STEPS
        assert_same(seen[module, name], seen[eager, name])


def test_gradients_of_some_weights_only() -> None:
    torch.manual_seed(0)
    model, x = Cells(6), torch.randn(5, 3, 6)
    eager = eager_copy(model)
    module = wrap(model, x, 1.0)
    for i in range(STEPS + 2):
        if i < 4:
            step(module, x, alone, keep=False)
            continue
        names = ["cell.weight_hh"] if i % 2 else ["cell.bias_ih", "cell.weight_ih"]
        asked = [
            torch.autograd.grad(alone(net, x), [net.get_parameter(n) for n in names])
            for net in (module, eager)
        ]
        assert_same(list(asked[0]), list(asked[1]))


class Keeping(TorchDispatchMode):
    """Keeps every tensor that an operation makes."""

    only_watches = True

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.kept.append(result)
        return result


@pytest.mark.parametrize("loss", [alone, used_later])
def test_under_a_mode_that_keeps_tensors_alive(loss: Loss) -> None:
    torch.manual_seed(0)
    model, x = Cells(6), torch.randn(5, 3, 6)
    eager = eager_copy(model)
    module = wrap(model, x, 1.0)
    for _ in range(4):
        step(module, x, alone, keep=False)
    module.zero_grad()
    with Keeping():
        loss(module, x).backward()
    assert_same(bits(module), step(eager, x, loss, keep=False))


def test_two_backwards_through_one_forward() -> None:
    torch.manual_seed(0)
    model, x = Cells(6), torch.randn(5, 3, 6)
    eager = eager_copy(model)
    module = wrap(model, x, 1.0)
    for _ in range(STEPS):
        for net in (module, eager):
            net.zero_grad()
            y = net(x)
            y.square().mean().backward(retain_graph=True)
            y.sum().backward()
        assert_same(bits(module), bits(eager))


def summed(model: nn.Module, x: Tensor) -> tuple[SimplifiedGraph, StepProgram]:
    graph = runnable(D_to_S(B_to_D(make_B(copy.deepcopy(model), (x,))))).graph
    count = len(graph.nodes)
    steps = [*(("F", k) for k in range(count)), *(("B", k) for k in reversed(range(count)))]
    program = lower_step(graph, steps)
    return graph, SharedUses.of(graph, program).in_sums(program)


def test_a_program_in_sums_hands_over_what_was_recorded_and_no_other_does() -> None:
    torch.manual_seed(0)
    graph, program = summed(Cells(6), torch.randn(5, 3, 6))
    check_program(graph, program)
    assert len(program.gives) == 4, "first parts of the two products, and the ends of their sums"
    places = [i for i, s in enumerate(program.backward) if isinstance(s, Sum)]
    assert len(places) == 4 * 5
    for place in places:
        statement = program.backward[place]
        assert isinstance(statement, Sum)
        other = {"first": "add", "add": "first"}[statement.kind]
        for lines in (
            [],  # dropped
            [statement, statement],
            [replace(statement, kind=other)],
            [replace(statement, leaf="p_cell_weight_ih")] * (statement.leaf[-9:] != "weight_ih"),
        ):
            wrong = (*program.backward[:place], *lines, *program.backward[place + 1 :])
            with pytest.raises(InvalidGraphError):
                check_program(graph, replace(program, backward=wrong))
    for place, statement in enumerate(program.backward):
        if isinstance(statement, Give) and statement.ends:
            (leaf, added), *rest = statement.ends
            for ends in ((), ((leaf, added - 1), *rest)):
                wrong_end = replace(statement, ends=ends)
                wrong = (*program.backward[:place], wrong_end, *program.backward[place + 1 :])
                with pytest.raises(InvalidGraphError):
                    check_program(graph, replace(program, backward=wrong))


def test_sums_are_a_program_of_their_own_where_they_are_many() -> None:
    torch.manual_seed(0)
    model, x = Cells(6), torch.randn(9, 3, 6)
    module = wrap(model, x, 1.0)
    executable = module._rockmate.first.executor.expected
    assert executable.backs is executable, "nobody knows yet what comes from elsewhere"
    for _ in range(STEPS):
        module(x).square().mean().backward()
    assert executable.backs is executable.summed
    assert executable.summed.compiled.source.count("().add_(") == 4 * 8
    tied = Tied()
    text = torch.randint(9, (2, 5))
    few = wrap(tied, text, 1.0)
    for _ in range(STEPS):
        few(text).square().mean().backward()
    executable = few._rockmate.first.executor.expected
    assert any(executable.shared_uses.ends)
    assert executable.backs is executable


def test_values_that_others_read_are_not_added_to() -> None:
    """The bias's gradient is the very tensor that goes on: adding to it would change others."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(torch.tanh(x + self.shift) + self.shift)

    torch.manual_seed(0)
    model, x = Shifted(), torch.randn(4, 6)
    graph = runnable(D_to_S(B_to_D(make_B(copy.deepcopy(model), (x,))))).graph
    count = len(graph.nodes)
    steps = [*(("F", k) for k in range(count)), *(("B", k) for k in reversed(range(count)))]
    uses = SharedUses.of(graph, lower_step(graph, steps))
    assert sum(len(part) for part in uses.leaves) == 2
    assert not any(uses.ends)
    eager = eager_copy(model)
    module = wrap(model, x, 10_000)
    for _ in range(STEPS):
        assert_same(step(module, x, alone, keep=False), step(eager, x, alone, keep=False))
