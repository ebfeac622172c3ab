"""Gradients leave a step as in plain PyTorch: other kinds, hooks, errors, split backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import rockmate
from fake_cuda.device import fake_cuda
from oracles.training import assert_same_gradients, eager_copy
from rkgb.engine import trace_memory
from rockmate.errors import BackwardTwiceError, UnsupportedModuleError
from runs.planned import wrap


class Convolutions(nn.Module):
    """Two outputs, whose gradients may come in any order of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(part for _ in range(3) for part in (nn.Conv2d(4, 4, 3, padding=1), nn.GELU()))
        )
        self.left, self.right = nn.Conv2d(4, 4, 1), nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return self.left(y), self.right(y)


class Unrolled(nn.Module):
    """One cell over time, and a weight that is used twice; a result for each point of time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 6), nn.Linear(6, 6)
        self.head.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> list[Tensor]:
        state, found = x[0], []
        for point in x:
            state = self.cell(point, state)
            found.append(nn.functional.linear(self.head(state), self.head.weight))
        return found


def channels_last(out: Any) -> Tensor:
    weights = torch.arange(out[0].numel() * 1.0).view_as(out[0])
    return (out[0] * weights.contiguous(memory_format=torch.channels_last)).mean()


def in_autocast(out: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return sum(o.square().mean() for o in out)  # type: ignore[no-any-return]


Loss = Callable[[Any], Tensor]
LOSSES: dict[str, Loss] = {
    "all": lambda out: sum((o.square().mean() for o in out), torch.zeros(())),
    "sum": lambda out: sum((o.sum() for o in out), torch.zeros(())),
    "first": lambda out: out[0].square().mean(),
    "last": lambda out: out[-1].exp().sum(),
    "middle": lambda out: out[len(out) // 2].square().sum() * 3,
    "mean of the first": lambda out: 2 * out[0].mean(),
}
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Loss]]] = {
    "convolutions": (Convolutions, (2, 4, 8, 8), {**LOSSES, "channels last": channels_last}),
    "cells": (Unrolled, (5, 3, 6), LOSSES),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("budget", [1.0, 0.9])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("seed", range(2))
def test_kinds_of_gradients_come_in_any_order(name: str, budget: float, seed: int) -> None:
    make, shape, losses = NETS[name]
    torch.manual_seed(seed)
    model, x = make(), torch.randn(shape)
    twin = eager_copy(model)
    wrapped = wrap(model, x, budget)
    names = list(losses)
    order = [names[i] for i in torch.randint(len(names), (8,)).tolist()]
    for at, kind in enumerate([*["all"] * 5 * (seed % 2), *order, *names]):
        for module, call in ((model, wrapped), (twin, twin)):
            if at % 3:
                module.zero_grad()
            if at % 4 == 3:  # the backward runs in a region of autocast
                with torch.autocast("cpu", torch.bfloat16):
                    losses[kind](call(x)).backward()
            else:
                losses[kind](call(x)).backward()
        assert_same_gradients(model, twin)


def noisy(module: nn.Module, seen: list[str]) -> None:
    def hook(gradient: Tensor, name: str) -> Tensor:
        seen.append(name)
        return gradient + torch.randn_like(gradient)

    for name, p in module.named_parameters():
        p.register_hook(lambda g, name=name: hook(g, name))


class Tied(nn.Module):
    """Branches, norms with two leaves each, and a weight of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.out = nn.Linear(8, 11)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x))
        q, k, v = (part(h) for part in self.parts)
        y = self.attend(q, k, v, need_weights=False)[0] + self.lstm(h)[0]
        return self.out(self.norm(y + q))


def plain_chain() -> nn.Module:
    return nn.Sequential(*(q for _ in range(4) for q in (nn.Linear(6, 6), nn.GELU())))


HOOKED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "a chain": (plain_chain, lambda: torch.randn(5, 6)),
    "cells": (Unrolled, lambda: torch.randn(4, 3, 6)),
    "tied": (Tied, lambda: torch.randint(11, (3, 4))),
    "convolutions": (Convolutions, lambda: torch.randn(2, 4, 8, 8)),
}


class Gates(nn.Module):
    """Cells that write one gate's operation into another's, so that nodes are in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        state = (torch.zeros_like(x), torch.zeros_like(x))
        for _ in range(3):
            state = self.cell(x, state)
        return state[0]


@pytest.mark.parametrize("budget", [1.0, 0.9])
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_that_draw_are_called_in_eagers_order(name: str, budget: float) -> None:
    make, inputs = HOOKED[name]
    torch.manual_seed(0)
    model, x = make(), inputs()
    twin = eager_copy(model)
    wrapped = wrap(model, x, budget)
    seen: tuple[list[str], list[str]] = ([], [])
    for at in range(6):
        if at == 2:  # from this step on
            noisy(model, seen[0])
            noisy(twin, seen[1])
        for module in (wrapped, twin):
            module.zero_grad()
            torch.manual_seed(at)
            out = module(x)
            loss = sum(
                o.square().mean() for o in (out if isinstance(out, (list, tuple)) else [out])
            )
            loss.backward()
        assert_same_gradients(model, twin)
        assert seen[0] == seen[1]
    assert len(seen[0]) == 4 * len(list(model.parameters()))


def test_hooks_are_called_in_eagers_order_or_with_a_warning() -> None:
    torch.manual_seed(0)
    model, x = Gates(), torch.randn(4, 6)
    twin = eager_copy(model)
    orders: list[list[str]] = []
    for module in (wrap(model, x, "1MiB"), twin):
        orders.append([])
        noisy(module, orders[-1])
        torch.manual_seed(1)
        module(x).square().mean().backward()
    assert orders[0] == orders[1] != []
    assert_same_gradients(model, twin)
    tight = wrap(Gates(), x, 1.0)
    noisy(tight, [])
    with pytest.warns(RuntimeWarning, match=r"hooks on parameters of Gates .* raise the budget"):
        tight(x)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_leaves_of_one_node_are_known_by_name_in_every_backward(make: Any) -> None:
    torch.manual_seed(0)
    model, x = make(8, 8, num_layers=2, bidirectional=True), torch.randn(4, 5, 8)
    twin, wrapped = eager_copy(model), wrap(model, x, "1MiB")
    for loss in (lambda y: y.square().mean(), lambda y: y.sum(), lambda y: 2 * y[:2].sum()):
        for module in (wrapped, twin):
            module.zero_grad()
            first, second = loss(module(x)[0]), loss(module(x + 1)[0])
            (first + 2 * second).backward()
        assert_same_gradients(model, twin)


@pytest.mark.parametrize("wanted", [slice(None), slice(1, None), slice(0, None, 2)])
def test_hooks_that_come_after_the_forward_of_some_leaves(wanted: slice) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]), torch.randn(4, 6)
    twin, orders = eager_copy(model), list[list[str]]()
    rk = wrap(model, x, "1MiB")

    def run(module: nn.Module) -> None:
        torch.autograd.grad(total, list(module.parameters())[wanted])

    total = rk(x).sum()
    noisy(rk, late := [])
    with pytest.raises(UnsupportedModuleError, match=r"between the forward .* another order"):
        run(rk)
    assert not late
    noisy(twin, [])
    for module in (rk, twin):
        torch.manual_seed(1)
        total = module(x).sum()
        orders.append([])
        noisy(module, orders[-1])
        run(module)
    assert orders[0] == orders[1] != []


@pytest.mark.parametrize("name", ["a chain", "convolutions", "tied"])
def test_hooks_that_come_after_the_forward_are_called_in_eagers_order(name: str) -> None:
    make, inputs = HOOKED[name]
    torch.manual_seed(0)
    model, x = make(), inputs()
    twin = eager_copy(model)
    wrapped = wrap(model, x, 1.0)
    orders: list[list[str]] = []
    for module, net in ((wrapped, model), (twin, twin)):
        torch.manual_seed(1)
        out = module(x)
        orders.append([])
        noisy(net, orders[-1])
        made = out if isinstance(out, (list, tuple)) else [out]
        sum(o.square().mean() for o in made).backward()
    assert orders[0] == orders[1]
    assert_same_gradients(model, twin)


def staged(module: nn.Module, x: Tensor, gradient: Tensor) -> Tensor:
    """Take one step as zero-bubble schedules do: first the inputs' gradients, then the weights'."""
    x = x.detach().requires_grad_()
    y = module(x)
    (found,), groups = stage_backward_input([y], [gradient], [x], module.parameters())
    stage_backward_weight(module.parameters(), groups)
    assert found is not None
    return found


class Deciding(nn.Module):
    """Decides by a value, so that it runs whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y.tanh() if y.mean() > -100 else y)


def test_hooks_of_a_part_that_runs_whole_are_called_in_eagers_order() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Deciding(), nn.Linear(8, 8))
    twin, orders = eager_copy(model), list[list[str]]()
    rk = wrap(model, torch.randn(4, 8), "1MiB")
    assert list(rk.plan.opaque) == ["1"]
    for net, run in ((model, rk), (twin, twin)):
        orders.append(order := [])
        for name, p in net.named_parameters():
            p.register_hook(lambda g: g + 0.1 * torch.randn_like(g))
            p.register_post_accumulate_grad_hook(lambda _, n=name, o=order: o.append(n))
        torch.manual_seed(1)
        run(torch.randn(4, 8)).square().mean().backward()
    assert orders[0] == orders[1]
    assert_same_gradients(model, twin)


class Chooses(nn.Module):
    """Runs whole: it takes another expert for other values, and one parameter never."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = self.experts[int(x.mean() > 0)](x)
        return chosen


class TwoHeads(nn.Module):
    """Is planned; a loss of one output gives the other head no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x).tanh()
        return self.left(y), self.right(y)


@pytest.mark.parametrize("kind", [Chooses, TwoHeads])
@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_no_hook_is_called_for_a_parameter_that_gets_no_gradient(
    kind: type[nn.Module], is_part: bool, after: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), kind()) if is_part else kind()
    twin, calls = eager_copy(model), list[list[str]]()
    rk = wrap(model, torch.randn(4, 8), "1MiB")
    for net, run in ((model, rk), (twin, twin)):
        calls.append(seen := [])
        handles = {}
        for name, p in net.named_parameters():

            def hook(g: Tensor, seen: list[str] = seen, name: str = name) -> Tensor:
                seen.append(name)
                return g + 0.1 * torch.randn_like(g)

            def accumulated(p: Tensor, seen: list[str] = seen, name: str = name) -> None:
                seen.append(name)
                assert p.grad is not None
                p.grad += 0.1 * torch.randn_like(p)

            handles[name] = (
                p.register_post_accumulate_grad_hook(accumulated)
                if after
                else p.register_hook(hook)
            )
        torch.manual_seed(1)
        for step in range(4):
            out = run(torch.randn(4, 8) + (-1) ** step)
            (out if isinstance(out, Tensor) else out[step % 2]).square().mean().backward()
            if step == 2:  # a hook that was not called can be taken off
                handles[name].remove()
                assert name not in seen[-1:]
    assert calls[0] == calls[1]
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("way", ["Rockmate", "apply", "apply_to_blocks"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_backward_is_split_into_inputs_and_weights(way: str, is_shared: bool) -> None:
    if is_shared and torch.__version__.startswith("2.11."):
        pytest.skip("this torch splits a plain backward with shared weights wrongly")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)) for _ in range(4)]
    if is_shared:
        for block in blocks:
            block[0].weight = block[2].weight
    model = nn.Sequential(*blocks)
    x, gradient = torch.randn(5, 6, requires_grad=True), torch.randn(5, 6)
    twin = eager_copy(model)
    module: nn.Module = model
    match way:
        case "Rockmate":
            module = wrap(model, x, 0.9)
        case "apply":
            rockmate.apply(model, x, 0.9, cost="flops")
        case _:
            rockmate.apply_to_blocks(model, x, 0.9, cost="flops", compare=False)
    # Parts that went together are told apart from then on, in each planned module.
    for _ in (blocks if way == "apply_to_blocks" else blocks[:1]) if is_shared else ():
        with pytest.raises(RuntimeError) as caught:
            staged(module, x, gradient)
        assert isinstance(caught.value.__cause__, BackwardTwiceError)
        assert "Run the step again" in str(caught.value.__cause__)
    module.zero_grad()
    for at in range(4):
        ours, theirs = (staged(net, x, gradient) for net in (module, twin))
        assert torch.equal(ours, theirs)
        assert_same_gradients(model, twin)
        for net in (module, twin):  # and a step as usual
            net(x).backward(gradient)
        assert_same_gradients(model, twin)
        for net in (module, twin) if at % 2 else ():
            net.zero_grad()


def test_a_part_of_a_backward_that_is_gone_is_refused_by_name() -> None:
    model, x = plain_chain(), torch.randn(5, 6, requires_grad=True)
    wrapped = wrap(model, x, 1.0)
    y = wrapped(x)
    node = y.grad_fn.next_functions[-1][0]
    y.sum().backward()
    with pytest.raises(BackwardTwiceError, match="out of order"):
        torch.autograd.grad(torch.autograd.graph.GradientEdge(node, 0), x, torch.empty(0))
    twin = eager_copy(model)
    for net in (wrapped, twin):
        net.zero_grad()
        net(x).sum().backward()
    assert_same_gradients(model, twin)


def test_backwards_for_some_leaves_twice() -> None:
    torch.manual_seed(0)
    model, x = plain_chain(), torch.randn(5, 6, requires_grad=True)
    twin = eager_copy(model)
    wrapped = wrap(model, x, 0.9)
    for at in range(4):
        found = []
        for net, own in ((wrapped, model), (twin, twin)):
            first, last = own[0].weight, own[6].bias
            y = net(x)
            values = torch.autograd.grad(y.mean(), [last], retain_graph=True)
            y.sum().backward(inputs=[first], retain_graph=True)
            values += torch.autograd.grad(y, [x, last], torch.ones_like(y) * at, retain_graph=True)
            y.square().sum().backward()
            found.append(values)
        assert all(map(torch.equal, *found))
        assert_same_gradients(model, twin)


def _in_one_memory(model: nn.Module) -> None:
    parameters = [*model.parameters()]
    whole = torch.cat([p.detach().flatten() for p in parameters])
    for p, part in zip(parameters, whole.split([p.numel() for p in parameters]), strict=True):
        p.data = part.view_as(p)


@pytest.mark.parametrize("are_parts", [False, True])
@pytest.mark.parametrize("converted", ["", "0", "2", "4"])
def test_gradients_add_up_at_the_nodes_that_a_conversion_has_made(
    converted: str, are_parts: bool
) -> None:
    """Hooks on these nodes are DDP's; and gradients of several steps are added there first."""
    model = nn.Sequential(*(p for _ in range(3) for p in (nn.Linear(8, 8), nn.Tanh())))
    if are_parts:
        _in_one_memory(model)
    planned, x = wrap(model, torch.randn(4, 8), 1.0), torch.randn(4, 8)
    for _ in range(3):
        planned(x).sum().backward()
    model.get_submodule(converted).double().float()
    twin = eager_copy(model)
    for net in (planned, twin):  # what is added up first shows in the last bits
        net.zero_grad()
        losses = [net(x * scale).square().sum() for scale in (1.0, 3.0, 0.7)]
        sum(losses).backward()  # type: ignore[union-attr]
    assert_same_gradients(model, twin)
    nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]  # type: ignore[union-attr]
    called: list[int] = []
    for number, node in enumerate(nodes):
        node.register_hook(lambda *_, n=number: called.append(n))
    planned(x).sum().backward()
    assert sorted(called) == [*range(len(nodes))]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_step_after_an_error_in_a_hook(error: type[BaseException]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(q for _ in range(4) for q in (nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.2)))
    )
    x = torch.randn(50, 6)
    twin = eager_copy(model)
    wrapped = wrap(model, x, 0.8)
    hooked = [net[6].weight for net in (model, twin)]

    def fail(_: Tensor) -> None:
        raise error("in a hook")

    for at in range(6):
        for net, weight in zip((wrapped, twin), hooked, strict=True):
            net.zero_grad()
            torch.manual_seed(at)
            y = net(x)
            handle = weight.register_hook(fail) if at % 2 else None
            if handle is None:
                y.square().sum().backward()
                continue
            with pytest.raises(error, match="in a hook"):
                y.square().sum().backward()
            handle.remove()
        if at % 2 == 0:
            assert_same_gradients(model, twin)


@pytest.mark.parametrize("loss", [Tensor.sum, Tensor.mean, lambda y: 3 * y.sum()])
def test_the_gradient_of_a_sum_is_expected(loss: Loss, caplog: pytest.LogCaptureFixture) -> None:
    """It is one number, expanded."""
    torch.manual_seed(0)
    model = nn.Sequential(*(q for _ in range(2) for q in (nn.Linear(8, 8), nn.GELU())))
    x = torch.randn(8, 8)
    twin = eager_copy(model)
    wrapped = wrap(model, x, 1.0)
    for _ in range(3):
        for net in (model, twin):
            for p in net.parameters():
                p.grad = torch.zeros_like(p)
        peak = trace_memory(lambda _: loss(wrapped(x)).backward(), x.device).peak_bytes
        # The scalars of the loss and of its gradient are not the module's.
        assert peak <= wrapped.budget_bytes + 64
        loss(twin(x)).backward()
        assert_same_gradients(model, twin)
    assert "in a new way" not in caplog.text


class Halving(nn.Module):
    """Halves the gradient of what it gets, by a hook."""

    def __init__(self, *, returns_it: bool) -> None:
        super().__init__()
        self.returns_it, self.inner = returns_it, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda g: g * 0.5)
        return x if self.returns_it else self.inner(x)


@pytest.mark.parametrize("returns_it", [False, True])
def test_a_hook_on_an_argument_of_a_part(returns_it: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Halving(returns_it=returns_it), nn.Linear(8, 8))
    twin, x = eager_copy(model), torch.randn(4, 8)
    rk = wrap(model, x, "1MiB", self_test=False)
    rk(x).square().mean().backward()
    twin(x).square().mean().backward()
    assert_same_gradients(model, twin)


def test_a_step_on_another_stream_is_handed_over_there() -> None:
    """Nodes keep the stream of their making, those that add gradients up too: none may stay."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    twin, x = eager_copy(model), torch.randn(3, 4)

    def adds_up() -> Any:
        return torch.autograd.graph.get_gradient_edge(model[0].weight).node

    with fake_cuda(workspace_bytes=0) as device:
        rk = wrap(model, x, 1.0)
        for stream, is_known in ((0, None), (0, True), (7, False), (7, True), (0, False)):
            device.stream = stream
            for module in (rk, twin):
                module(x).square().mean().backward()
            assert_same_gradients(rk, twin)
            if is_known is not None:
                assert ("met" in adds_up().metadata) == is_known
            adds_up().metadata["met"] = True


class NoisyInside(nn.Module):
    """Its forward puts a hook, so that it runs whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.requires_grad:
            x.register_hook(lambda g: g + torch.rand(8))
        return self.second(x)


def test_hooks_that_draw_beside_a_whole_part_whose_backward_draws_are_told() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(NoisyInside(), nn.Linear(8, 8))
    x = torch.randn(8, 8)
    planned = wrap(net, x, 1 << 20)
    planned(x).sum().backward()  # without hooks on parameters nothing is told
    net[0].second.weight.register_hook(lambda g: g + torch.rand(8))
    with pytest.warns(RuntimeWarning, match=r"submodule '0' runs whole, its backward draws"):
        planned(x).sum().backward()
