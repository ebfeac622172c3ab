"""Habits of models that nobody wrote for Rockmate: each trains bit for bit, within its budget."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, func, nn
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint

from oracles.training import assert_same_gradients
from rkgb import TraceError
from rkgb.engine import trace_memory
from rockmate import InfeasibleBudgetError, Rockmate
from runs.planned import wrap

Batch = Callable[[int], tuple[Any, ...]]


def drawn(step: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def rows(step: int) -> tuple[Any, ...]:
    return (drawn(step, 64, 16),)


def wrapped(model: nn.Module, sample: Any, budget: float) -> Rockmate:
    """Plan for a share of the plain peak, or for the smallest budget above it."""
    try:
        return wrap(model, sample, budget)
    except InfeasibleBudgetError as error:
        return wrap(model, sample, error.minimum_bytes)


def outcome(model: Callable[..., Any], parameters: list[nn.Parameter], batch: Batch) -> list[Any]:
    torch.manual_seed(5)
    optimizer, seen = torch.optim.SGD(parameters, lr=0.05), []
    for step in range(3):
        args = batch(step)
        result = model(*args)
        results = result if isinstance(result, tuple) else (result,)
        results = tuple(t.data if isinstance(t, rnn.PackedSequence) else t for t in results)
        sum(t.square().mean() for t in results if t.requires_grad).backward()  # type: ignore[union-attr]
        seen += [t.detach().clone() for t in (*results, *args) if isinstance(t, Tensor)]
        seen += [p.grad.clone() for p in parameters if p.grad is not None]
        optimizer.step(), optimizer.zero_grad()
    return [*seen, torch.get_rng_state()]


def assert_trains_alike(model: nn.Module, batch: Batch, budget: float) -> Rockmate:
    twin = copy.deepcopy(model)
    rk = wrapped(model, batch(0), budget)
    assert rk.measured_peak_bytes is not None
    assert rk.measured_peak_bytes <= rk.budget_bytes
    ours = outcome(rk, list(model.parameters()), batch)
    plain = outcome(twin, list(twin.parameters()), batch)
    assert len(ours) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    for name, buffer in twin.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), name
    return rk


class Layers(nn.Module):
    """Some layers, and what a case does with them."""

    def __init__(self, body: Callable[..., Any], *, count: int = 4, width: int = 16) -> None:
        super().__init__()
        self.body = [body]
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, *args: Any) -> Any:
        return self.body[0](self, *args)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Cubed(torch.autograd.Function):
    """Computes in numpy, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return torch.from_numpy(np.power(x.detach().numpy(), 3) * np.float32(scale))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(3 * ctx.scale * x.numpy() ** 2 * grads[0].numpy()), None


class Apart(torch.autograd.Function):
    """Sets its context up apart from its forward, and returns two tensors."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(x.detach().numpy() * 2), torch.from_numpy(y.detach().numpy() > 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2, None


def in_numpy(net: Layers, x: Tensor) -> Tensor:
    for layer in net.layers[:2]:
        x = Cubed.apply(layer(x).tanh(), 0.5)
        x, positive = Apart.apply(x, x.detach())
        x = torch.where(positive, x, x * 0.5)
    return x


class Recomputing(torch.autograd.Function):
    """Calls autograd in its backward, as a checkpoint does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh() * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            result = x.tanh() * x
        return torch.autograd.grad(result, x, grads[0])


def recomputing(net: Layers, x: Tensor) -> Tensor:
    for layer in net.layers[:2]:
        x = Recomputing.apply(layer(x))
    return x


def doubled(net: Layers, x: Tensor) -> Tensor:
    x.mul_(2)
    return net.run(x)


def masked(net: Layers, x: Tensor, mask: Tensor) -> Tensor:
    mask[:, 0] = False
    return net.run(x.masked_fill(mask, 0.0))


def sampled(net: Layers, x: Tensor) -> Tensor:
    mean, log_scale = net.layers[0](x).chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_scale.exp())
    return net.layers[1](torch.cat([normal.rsample(), mean], -1)).tanh()


def force(net: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    energy = net.run(x).square().sum()
    (slope,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy, -slope


def slopes(net: Layers, x: Tensor) -> Tensor:
    energy = func.jacrev(lambda row: net.layers[1](net.layers[0](row).tanh()).square().sum())
    return net.run(x) + func.vmap(energy)(x)


class Slope(nn.Module):
    """Autograd inside a transform, in one submodule among others."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return func.vmap(func.grad(lambda row: self.net(row).sum()))(x)


def with_weight(net: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
    return net.run(x), net.layers[0].weight


def in_rows(net: Layers, x: Tensor) -> Tensor:
    nested = torch.nested.as_nested_tensor([x[:3], x[3:8]], layout=torch.jagged)
    return net.run(nested).values()


def over_a_graph(net: Layers, x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    graph = torch.sparse_coo_tensor(places, weights, (64, 64))
    for layer in net.layers:
        x = torch.sparse.mm(graph, layer(x)).tanh()
    return x


def edges(step: int) -> tuple[Any, ...]:
    return drawn(step, 64, 16), torch.arange(64).repeat(2, 1), drawn(step, 64)


def branches(net: Layers, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda z: net.layers[0](z).relu(), net.layers[1], (x,))


def with_mask(step: int) -> tuple[Any, ...]:
    return drawn(step, 64, 16), drawn(step, 64, 16) > 0


CASES: dict[str, tuple[Callable[..., Any], Batch, float, list[str]]] = {
    "a Function in numpy": (in_numpy, rows, 0.7, []),
    "a Function that calls autograd": (recomputing, rows, 1.0, []),
    "an argument changed in place": (doubled, rows, 0.8, []),
    "a mask changed in place": (masked, with_mask, 0.8, []),
    "distributions that check": (sampled, rows, 0.9, []),
    "autograd.grad inside": (force, rows, 1.0, [""]),
    "a transform inside": (slopes, rows, 1.0, [""]),
    "a parameter returned": (with_weight, rows, 0.6, []),
    "nested tensors inside": (in_rows, rows, 1.0, [""]),
    "sparse tensors inside": (over_a_graph, edges, 1.0, [""]),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_habits(name: str) -> None:
    torch.manual_seed(0)
    body, batch, budget, opaque = CASES[name]
    rk = assert_trains_alike(Layers(body), batch, budget)
    assert list(rk.plan.opaque) == opaque


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler
def test_cond() -> None:
    torch.manual_seed(0)
    assert_trains_alike(Layers(branches, count=2), rows, 1.0)


def returned_twice(net: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
    y = net.run(x)
    return y, y


def test_a_tensor_that_is_returned_twice_keeps_the_budget() -> None:
    """Its two gradients come as one sum, which the user's backward has made."""
    rk = assert_trains_alike(Layers(returned_twice), rows, 0.7)
    for parameter in rk.parameters():
        parameter.grad = torch.zeros_like(parameter)
    (x,) = rows(0)

    def step(_span: Any) -> None:
        first, second = rk(x)
        assert first is second
        (first.sum() + second.sum()).backward()

    scalars_bytes = 64  # sums and their gradients are the user's
    peak_bytes = trace_memory(step, torch.device("cpu")).peak_bytes
    assert peak_bytes <= rk.budget_bytes + scalars_bytes


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y, y


def test_the_self_test_adds_no_gradients_of_one_tensor() -> None:
    """The sum of two gradients would be memory that no plan counts."""
    x = torch.randn(64, 8)
    with pytest.raises(InfeasibleBudgetError) as refused:
        Rockmate(Twice(), (x,), 1, cost="flops")
    least = refused.value.minimum_bytes
    planned = Rockmate(Twice(), (x,), least, cost="flops")
    assert planned.measured_peak_bytes == least


def test_a_transform_in_a_submodule_is_planned_as_one_piece() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(*layers[:3], Slope(), *layers[3:])
    rk = assert_trains_alike(model, rows, 0.75)
    assert list(rk.plan.opaque) == ["3"]
    assert rk.plan.overhead > 0


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(8, 8, num_layers=2, bidirectional=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor | rnn.PackedSequence) -> Any:
        found = self.inner(x)[0]
        if isinstance(found, rnn.PackedSequence):
            return self.head(found.data)
        return self.head(found)


@pytest.mark.parametrize("kind", [nn.LSTM, pytest.param(nn.GRU, marks=pytest.mark.slow)])
def test_a_recurrent_net_is_planned_by_layer_and_direction(kind: type[nn.RNNBase]) -> None:
    """The budget is below what one whole of it saves."""
    torch.manual_seed(0)
    model = Recurrent(kind)
    rk = assert_trains_alike(model, lambda step: (drawn(step, 6, 8, 8),), 0.5)
    assert rk.eager_peak_bytes is not None
    assert rk.budget_bytes <= 0.5 * rk.eager_peak_bytes
    assert not rk.plan.opaque


def test_packed_sequences() -> None:
    torch.manual_seed(0)

    def batch(step: int) -> tuple[Any, ...]:
        return (rnn.pack_sequence([drawn(step, 6, 8), drawn(step + 9, 4, 8)]),)

    assert_trains_alike(Recurrent(nn.GRU), batch, 1.0)


def within(limit: float, found: Tensor) -> bool:
    return bool((found.abs() <= limit).all())


class Checking(Layers):
    def forward(self, *args: Any) -> Any:
        found = self.run(args[0])
        if not found.isfinite().all():
            raise ArithmeticError("not finite")
        if not within(3.0, found * args[1]):
            raise ArithmeticError("too far out")
        assert found.abs().max() <= 1.0, "too large"
        return found * args[1]


def test_checks_on_computed_values_still_fire() -> None:
    torch.manual_seed(0)
    model = Checking(lambda: None)
    one = torch.ones(())
    rk = assert_trains_alike(model, lambda step: (drawn(step, 64, 16), one), 0.8)
    assert not rk.plan.opaque
    stream = torch.get_rng_state()
    bad = drawn(9, 64, 16)
    bad[0, 0] = torch.nan
    with pytest.raises(ArithmeticError, match="not finite"):
        rk(bad, one)
    with pytest.raises(ArithmeticError, match="too far out"):  # a function of its own looks
        rk(drawn(9, 64, 16), one * 100)
    assert torch.equal(torch.get_rng_state(), stream)
    rk(drawn(10, 64, 16), one).sum().backward()


def test_a_choice_by_what_another_function_looks_at_runs_whole() -> None:
    torch.manual_seed(0)

    def forward(net: Layers, x: Tensor) -> Tensor:
        found = net.run(x)
        return found if within(0.9, found) else -found

    rk = assert_trains_alike(Layers(forward), lambda step: (drawn(step, 64, 16) * (step % 2),), 1.0)
    assert rk.plan.opaque


def test_an_argument_that_shares_memory_is_a_plain_step() -> None:
    """What a forward writes to one argument it would see in the other."""
    torch.manual_seed(0)
    model = Layers(lambda net, x, y: net.run(x.mul_(2)) + y)
    twin = copy.deepcopy(model)
    x = drawn(0, 8, 16)
    rk = wrapped(model, (x.clone(), x.clone()), 1.0)
    both, other = x.clone(), x.clone()
    with pytest.warns(RuntimeWarning, match="runs plain"):
        result = rk(both, both.view_as(both))
    assert torch.equal(result, twin(other, other))
    assert torch.equal(both, other)
    assert torch.equal(rk(both, both), twin(other, other)), "one object is planned as such"
    assert torch.equal(both, other)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_batch_norm_in_a_checkpoint_counts_a_step_once(reentrant: bool) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16)

    def body(net: Layers, x: Tensor) -> Tensor:
        return net.run(checkpoint(norm_of(net), net.layers[0](x), use_reentrant=reentrant))

    def norm_of(net: Layers) -> nn.Module:
        return net.get_submodule("norm")

    model = Layers(body)
    model.add_module("norm", norm)
    twin = copy.deepcopy(model)
    twin.body = [lambda net, x: net.run(net.norm(net.layers[0](x)))]
    rk = Rockmate(model, rows(0), 1.0)
    rk(*rows(1)).sum().backward()
    twin(*rows(1)).sum().backward()
    assert_same_gradients(model, twin)
    assert torch.equal(model.get_buffer("norm.running_var"), twin.get_buffer("norm.running_var"))
    assert int(model.get_buffer("norm.num_batches_tracked")) == 1


def test_hooks_that_leave_a_weight_need_no_other_backward() -> None:
    """The weight of the old spectral_norm is an attribute: no gradient starts there."""
    torch.manual_seed(0)
    layers = [nn.utils.spectral_norm(nn.Linear(16, 16)) for _ in range(3)]
    rk = Rockmate(nn.Sequential(*layers), rows(0), 0.9)
    assert rk.measured_peak_bytes is not None
    assert rk.measured_peak_bytes <= rk.budget_bytes


def test_nested_and_sparse_samples_are_refused_in_our_words() -> None:
    parts = [torch.randn(3, 16), torch.randn(5, 16)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    with pytest.raises(TraceError, match="nested tensor"):
        Rockmate(nn.Linear(16, 16), nested, 1.0)
    with pytest.raises(TraceError, match="argument 0 is sparse"):
        Rockmate(nn.Linear(16, 16), parts[0].to_sparse(), 1.0)


def test_a_sparse_embedding_gets_sparse_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 16, sparse=True), nn.Linear(16, 16), nn.Tanh())
    twin = copy.deepcopy(model)
    words = [torch.randint(40, (8, 4)) for _ in range(2)]
    rk = wrapped(model, words[0], 1.0)
    for ours, module in ((model, rk), (twin, twin)):
        optimizer = torch.optim.SparseAdam([ours.get_parameter("0.weight")])
        for given in words:
            optimizer.zero_grad()
            module(given).square().mean().backward()
            optimizer.step()
    ours, plain = model.get_parameter("0.weight"), twin.get_parameter("0.weight")
    assert ours.grad is not None
    assert plain.grad is not None
    assert ours.grad.is_sparse
    assert torch.equal(ours.grad.to_dense(), plain.grad.to_dense())
    assert torch.equal(ours, plain)


class Words(nn.Module):
    """One sparse embedding that is used again, and by what makes dense gradients too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        padding = 3 if kind == "padded" else None
        self.words = nn.Embedding(50, 16, padding_idx=padding, sparse=True)
        self.bag = nn.EmbeddingBag(50, 16, mode="sum", sparse=True)
        self.mix = nn.Linear(16, 16)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        if self.kind == "bags":
            return self.mix(self.bag(first)) + self.bag(second).tanh()
        x = self.mix(self.words(first)) + self.mix(self.words(second)).tanh()
        if self.kind == "thrice":
            x = x + self.words(first).sin()
        return nn.functional.linear(x, self.words.weight) if self.kind == "tied" else x


@pytest.mark.parametrize("kind", ["twice", "thrice", "tied", "padded", "bags"])
def test_sums_of_sparse_gradients_are_eagers_in_order(kind: str) -> None:
    torch.manual_seed(0)
    model = Words(kind)
    twin = copy.deepcopy(model)
    words = [torch.randint(50, (64, 16)) for _ in range(2)]
    try:
        rk = wrapped(model, tuple(words), 0.6)
    except InfeasibleBudgetError as error:
        rk = wrapped(model, tuple(words), error.minimum_bytes)
    assert rk.measured_peak_bytes is not None
    assert rk.measured_peak_bytes <= rk.budget_bytes
    assert rk.plan.opaque == (("words",) if kind == "padded" else ())
    for keep in (False, True, False):  # and in the gradient of the step before
        for module, call in ((model, rk), (twin, twin)):
            if not keep:
                module.zero_grad()
            call(*words).square().sum().backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is None or theirs.grad is None:
                continue
            assert ours.grad.layout == theirs.grad.layout
            if ours.grad.is_sparse:  # entry by entry: nothing is summed before eager sums it
                assert torch.equal(ours.grad._indices(), theirs.grad._indices())
                assert torch.equal(ours.grad._values(), theirs.grad._values())
            assert torch.equal(ours.grad.to_dense(), theirs.grad.to_dense())


@pytest.mark.parametrize(
    ("mode", "sparse"), [("sum", True), ("sum", False), ("mean", False), ("max", False)]
)
def test_the_peak_of_bags_is_foreseen_to_the_byte(mode: str, sparse: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(500, 64, mode=mode, sparse=sparse), nn.Linear(64, 8))
    twin = copy.deepcopy(model)
    words = torch.randint(500, (64, 20))
    rk = wrapped(model, words, 1.0)
    assert rk.plan.peak_bytes == rk.measured_peak_bytes == rk.eager_peak_bytes
    for module in (rk, twin):
        module(words).square().sum().backward()
    ours, plain = model.get_parameter("0.weight").grad, twin.get_parameter("0.weight").grad
    assert ours is not None
    assert plain is not None
    assert ours.layout == plain.layout
    assert torch.equal(ours.to_dense(), plain.to_dense())


class Offset(nn.Module):
    """A buffer that is trained, and one that only lets a loss of nothing have a backward."""

    zero: Tensor
    offset: Tensor

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
        self.register_buffer("offset", torch.ones(16).requires_grad_(trained))
        self.register_buffer("zero", torch.tensor(0.0), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.zero
        loss.requires_grad_()
        y = self.body(x) * self.offset
        return y, loss + y.abs().mean()


@pytest.mark.filterwarnings("ignore:outputs of Offset")  # they count, and go on into the loss
@pytest.mark.parametrize("trained", [False, True])
def test_buffers_with_gradients(trained: bool) -> None:
    torch.manual_seed(0)
    model = Offset(trained=trained)
    twin = Offset(trained=trained)
    twin.load_state_dict(model.state_dict())
    rk = wrapped(model, rows(0), 0.8)
    for step in range(3):
        for module in (rk, twin):
            y, loss = module(*rows(step))
            (y.square().mean() + loss).backward()
        assert_same_gradients(model, twin)
        if trained:
            assert twin.offset.grad is not None
            assert model.offset.grad is not None
            assert torch.equal(model.offset.grad, twin.offset.grad)


class Guarded(nn.Module):
    """Attributes that cannot be copied, in the module and in an object of its own."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
        self.kept = SimpleNamespace(lock=threading.RLock(), tools=[threading.Lock(), copy])
        self.lock = threading.Lock()
        vars(self).update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        with self.lock, self.kept.lock:
            return self.body(x)


def test_locks_and_modules_of_python_are_shared_with_copies() -> None:
    torch.manual_seed(0)
    model = Guarded()
    twin = copy.deepcopy(model.body)
    rk = wrapped(model, rows(0), 0.8)
    for step in range(2):
        rk(*rows(step)).square().mean().backward()
        twin(*rows(step)).square().mean().backward()
    assert_same_gradients(model.body, twin)
    assert not model.lock.locked()


def test_an_attribute_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(TraceError, match="attribute 'source' of module '\\(root\\)'"):
        Rockmate(Guarded(source=memoryview(b"one")), rows(0), 1.0)
