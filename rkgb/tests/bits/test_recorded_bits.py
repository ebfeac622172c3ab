"""What once could not be captured, and is now recorded as it is: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import rkgb
from oracles.gradients import assert_same_gradients, gradients_of_graph
from rkgb.published.check import assert_same_as_module


class Inner(nn.Module):
    """Does one thing, two modules below the root."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body = [body]
        self.kind: bool | None = False  # of checkpoints: reentrant, or none at all
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Any:
        return self.body[0](self, x)


class Doubled(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


class Remembering(torch.autograd.Function):
    """Keeps a tensor and a number beside what autograd saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept, ctx.scale = x.exp(), 3.0
        return ctx.kept * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * ctx.kept * ctx.scale


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 5


class Recomputing(torch.autograd.Function):
    """Calls autograd in its backward, as a checkpoint does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight).tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        with torch.enable_grad():
            x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            result = (x @ weight).tanh()
        return torch.autograd.grad(result, [x, weight], grad)


class Several(torch.autograd.Function):
    """Three results, of which one has no gradient and one is read by nobody."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x.reshape(-1), x > 0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor:  # type: ignore[override]
        double, flat, mask = grads
        assert flat is None
        assert mask is None
        assert double is not None
        return double * 2


def doubled(m: Any, x: Tensor) -> Any:
    return Doubled.apply(m.linear(x)).sin()


def remembering(m: Any, x: Tensor) -> Any:
    return Remembering.apply(m.linear(x)).sin()


def in_place(m: Any, x: Tensor) -> Any:
    return InPlace.apply(m.linear(x) + 1).sin()


def recomputing(m: Any, x: Tensor) -> Any:
    return Recomputing.apply(m.linear(x), m.weight) * m.weight.sum()


def several(m: Any, x: Tensor) -> Any:
    double, _, mask = Several.apply(m.linear(x))
    return (double * mask).sin()


def one_cast_with_and_without_gradient(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            target = m.linear(x)
        return (m.linear(x) - target * 0.5).float()


def one_cast_used_twice(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.linear(m.linear(x).tanh()).float()


def nested_regions(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            z = m.linear(y)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                z = z + (z @ m.weight).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scale = (y @ m.weight).float().mean()
    return z * scale


def checkpointed(m: Any, x: Tensor) -> Any:
    def part(x: Tensor) -> Tensor:
        return torch.dropout(m.linear(x).tanh(), 0.5, True) @ m.weight

    return checkpoint.checkpoint(part, x, use_reentrant=m.kind) if m.kind is not None else part(x)


def constants_in_control_flow(m: Any, x: Tensor) -> Any:
    steps = torch.linspace(0, 1, 3)
    for step in steps.tolist():
        if torch.tensor(step) > 0.3 and steps.sum().item() > 0:
            x = m.linear(x) * step
    return x


def default_generator(m: Any, x: Tensor) -> Any:
    return m.linear(x) * torch.rand(4, generator=torch.default_generator)


def index_by_integers(m: Any, x: Tensor) -> Any:
    order = x.sum(1).argsort()
    return m.linear(x)[order].cumsum(0)


@pytest.mark.parametrize(
    "body",
    [
        *(doubled, remembering, in_place, several),
        *(one_cast_with_and_without_gradient, one_cast_used_twice, nested_regions),
        *(checkpointed, constants_in_control_flow, default_generator, index_by_integers),
    ],
    ids=lambda body: body.__name__,
)
def test_results_and_gradients_are_those_of_the_module(body: Callable[[Any, Tensor], Any]) -> None:
    """On other values than those that were recorded, and at every layout of the program."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Inner(body), nn.Tanh())
    graph = rkgb.Stools.D_to_S(rkgb.Dtools.B_to_D(rkgb.Btools.make_B(model, torch.randn(5, 4))))
    for _ in range(2):
        sample = (torch.randn(5, 4),)
        assert_same_as_module(graph, model, sample)
        assert_same_gradients(graph, model, sample)


def test_a_backward_that_calls_autograd_is_named() -> None:
    """What it computes is recorded by nobody; rockmate runs the Function whole."""
    model = nn.Sequential(nn.Linear(4, 4), Inner(recomputing))
    with pytest.raises(rkgb.SideEffectError, match="a backward that calls autograd") as caught:
        rkgb.Btools.make_B(model, torch.randn(5, 4))
    assert "test_recorded_bits.py" in str(caught.value)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_is_recorded_as_what_it_runs(reentrant: bool) -> None:
    """What is recomputed is the plan's to decide."""
    recorded = []
    for kind in (None, reentrant):
        model = nn.Sequential(nn.Linear(4, 4), Inner(checkpointed))
        model[1].kind = kind
        basic = rkgb.Btools.make_B(model, torch.randn(5, 4))
        recorded.append([str(op) for op in (*basic.ops, *basic.backward)])
    assert recorded[0] == recorded[1]
    assert "bernoulli" in str(recorded[0])


def test_the_own_backward_of_a_function_is_used() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Inner(lambda m, x: Doubled.apply(m.weight * x)))
    plain = nn.Sequential(Inner(lambda m, x: m.weight * x * 1))
    plain.load_state_dict(model.state_dict())
    sample = (torch.randn(4, 4),)
    found = [
        gradients_of_graph(rkgb.make_all_graphs(m, sample, cost="flops").S_graph, m, sample)[0]
        for m in (model, plain)
    ]
    assert found[0] is not None
    assert found[1] is not None
    assert torch.equal(found[0], 2 * found[1])


class Counted(TorchDispatchMode):
    """Counts the kernels that run below it."""

    only_watches = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def factored(_: Any, x: Tensor) -> Tensor:
    """A matrix that must be positive, made by kernels that have run before."""
    for shift in (1.0, 2.0):
        x = torch.linalg.cholesky(x @ x.t() + shift * torch.eye(len(x))).exp()
    return x


def test_of_equal_layers_one_is_computed() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(6)])
    sample = torch.randn(5, 8)
    with Counted() as ran:
        basic = rkgb.Btools.make_B(model, sample)
    gelus = [op for op in basic.ops if op.target_name == "gelu"]
    assert len(gelus) == 6
    assert ran.seen.count("gelu.default") == 1
    assert_same_as_module(rkgb.make_all_graphs(model, sample, cost="flops").S_graph, model, sample)
    assert_same_gradients(rkgb.make_all_graphs(model, sample, cost="flops").S_graph, model, sample)


def test_where_a_kernel_refuses_what_stands_in_everything_runs() -> None:
    torch.manual_seed(0)
    model, sample = nn.Sequential(nn.Linear(6, 6), Inner(factored)), torch.randn(6, 6)
    graph = rkgb.make_all_graphs(model, sample, cost="flops").S_graph
    assert_same_as_module(graph, model, sample)
