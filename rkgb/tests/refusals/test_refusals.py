"""What a graph would get wrong is refused, and the message says where it is and what to do."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rkgb
from rkgb.published.check import assert_same_as_module


class Inner(nn.Module):
    """Does one thing that cannot be captured, two modules below the root."""

    def __init__(self, body: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = [body]
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body[0](self, x)


def nested(body: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"deep": Inner(body)})["deep"])


def branch(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) if x.sum() > 0 else x


def hooked(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    y.register_hook(lambda grad: grad * 2)
    return y


def inner_gradient(m: Any, x: Tensor) -> Tensor:
    return torch.autograd.grad(m.linear(x).sum(), m.linear.weight, create_graph=True)[0]


def failing(m: Any, x: Tensor) -> Tensor:
    raise KeyError("missing")


def item(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * x.sum().item()


def size(m: Any, x: Tensor) -> Tensor:
    return m.linear(x)[x > 0]


def listed(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * torch.tensor(x.tolist())


class Numpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.exp(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * ctx.saved_tensors[0].exp()


class NumpyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return torch.from_numpy(2 * grad.numpy())


class BranchBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2 if grad.sum() > 0 else grad


class FailingBackward(BranchBackward):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise KeyError("missing")


def numpy_function(m: Any, x: Tensor) -> Tensor:
    return Numpy.apply(m.linear(x))


def numpy_backward(m: Any, x: Tensor) -> Tensor:
    return NumpyBackward.apply(m.linear(x))


def branch_backward(m: Any, x: Tensor) -> Tensor:
    return BranchBackward.apply(m.linear(x))


def failing_backward(m: Any, x: Tensor) -> Tensor:
    return FailingBackward.apply(m.linear(x))


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (
            branch,
            rkgb.DataDependentError,
            r"torch\.where .*\(test_refusals\.py:\d+ \(return m\.lin.*\n.*control flow",
        ),
        (
            hooked,
            rkgb.SideEffectError,
            r"\(test_refusals\.py:\d+ \(y\.register_.*\n.* registers a hook",
        ),
        (
            inner_gradient,
            rkgb.SideEffectError,
            r"keep that part outside the .*\n.* calls torch\.autograd\.grad",
        ),
        (
            failing,
            rkgb.TraceError,
            r"\(test_refusals\.py:\d+ \(raise KeyError.*\n.* raised KeyError",
        ),
        (
            item,
            rkgb.DataDependentError,
            r"py:\d+ \(return m\.lin.*\n.* Python number depends on the",
        ),
        (
            size,
            rkgb.DataDependentError,
            r"py:\d+ \(return m\..*\n.* size of what 'aten\.ind.* depends",
        ),
        (
            listed,
            rkgb.DataDependentError,
            r":\d+ \(return m\.lin.*\n.* what 'tolist' gives depends on",
        ),
        (
            numpy_function,
            rkgb.DataDependentError,
            r"py:\d+ \(return torch\.f.*\n.* what 'numpy' gives",
        ),
        (
            numpy_backward,
            rkgb.DataDependentError,
            r"in the backward 'NumpyB.*ward' of module '1' \(test_ref.*py:\d+.*\n.*'numpy' gives",
        ),
        (
            branch_backward,
            rkgb.DataDependentError,
            r"in the backward 'BranchB.*ward' of module '1' \(test_refusals\.py:\d+.*\n.*flow",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refusals_name_the_module_and_the_line(
    body: Callable[[Any, Tensor], Tensor], kind: type[Exception], message: str
) -> None:
    model = nested(body)
    with pytest.raises(kind, match=message) as caught:
        rkgb.Btools.make_B(model, torch.randn(2, 4))
    assert "module '1'" in str(caught.value) or "(1, " in str(caught.value)


def test_what_a_backward_raises_is_said_with_its_line() -> None:
    model, message = nested(failing_backward), r"test_ref.*py:\d+ \(raise KeyError.*\n.* KeyError"
    with pytest.raises(rkgb.TraceError, match=message) as e:
        rkgb.Btools.make_B(model, torch.randn(2, 4))
    assert isinstance(e.value.__cause__, KeyError)


def test_a_write_to_what_a_backward_needs_is_refused_as_eager_refuses_it() -> None:
    """Recording gives up what autograd saves, whose own look at it is lost with it."""

    def overwriting(m: Any, x: Tensor) -> Tensor:
        y = m.linear(x).exp()
        y.mul_(2)
        return y

    def through_a_view(m: Any, x: Tensor) -> Tensor:
        y = m.linear(x)
        z = y.sin() * y[:, :1]
        y[:, 2] = 0.0
        return z

    def of_a_mask(m: Any, x: Tensor) -> Tensor:
        mask = torch.ones(4)
        y = m.linear(x) * mask
        mask.zero_()
        return y

    for body, name in ((overwriting, "mul_"), (through_a_view, "fill_"), (of_a_mask, "zero_")):
        model, x = nested(body), torch.randn(8, 4)
        with pytest.raises(RuntimeError, match="modified"):
            model(x).sum().backward()
        with pytest.raises(
            rkgb.InvalidGraphError, match=rf"'{name}' \(1, test_refusals\.py:\d+\)\.\n.* overwrites"
        ):
            rkgb.Btools.make_B(model, x)


def test_a_backward_that_writes_to_a_parameter_is_refused_before_it_does() -> None:
    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
            ctx.save_for_backward(count)
            return x.exp()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            ctx.saved_tensors[0].data.add_(1)
            return grad, None

    model = nested(lambda m, x: Counting.apply(m.linear(x), m.linear.bias))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(rkgb.SideEffectError, match=r"'add_' .* 'p_1_linear_bias' of Sequential"):
        rkgb.Btools.make_B(model, torch.randn(2, 4))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_backward_hook_of_a_submodule_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1].register_full_backward_hook(lambda module, grad_in, grad_out: None)
    with pytest.raises(rkgb.UnsupportedOpError, match=r"backward hook.* \(test_ref.*'1'\)") as e:
        rkgb.Btools.make_B(model, torch.randn(2, 4))
    assert e.value.module_path == "1"


def test_a_write_to_an_input_names_module_and_line() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nested(lambda m, x: m.linear(x)))
    x = torch.randn(4, 2).t()  # a copy of it would lie otherwise
    before = x.clone()
    with pytest.raises(rkgb.SideEffectError, match=r"'relu_' \(0, .*\.py:\d+\).*x = x\.clone\(\)"):
        rkgb.Btools.make_B(model, x[:, :1].expand(2, 4))
    assert torch.equal(x, before)


def counting(m: Any, x: Tensor) -> Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return m.linear(x)


def collecting(m: Any, x: Tensor) -> Tensor:
    m.body.append(m.linear(x))
    return x


def printing(m: Any, x: Tensor) -> Tensor:
    print("here")
    return m.linear(x)


def python_random(m: Any, x: Tensor) -> Tensor:
    scale = 1 + random.random()
    return m.linear(x) * scale


def numpy_random(m: Any, x: Tensor) -> Tensor:
    scale = float(np.random.rand())
    return m.linear(x) * scale


def seeding(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return nn.functional.dropout(m.linear(x))


def own_generator(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) + torch.rand(4, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (counting, r"attribute 'calls' .*module '1'\)\.\n.* looks at it, and then changes it"),
        (collecting, r"module '1'\)\.\n.* changes what attribute 'body' leads to \(list\)"),
        (printing, r"test_refusals\.py:\d+ \(print\(\"here\"\)\) in module.*\n.* logs 'here'"),
        (python_random, r"test_refusals\.py:\d+ \(scale = 1.*\n.* draws from Python's `random`"),
        (numpy_random, r"test_ref.*:\d+ \(scale = float.*\n.*draws from numpy's random numbers"),
        (seeding, r"test_refusals\.py:\d+ \(torch\.manual_seed.*\n.*sets the state of torch's"),
        (own_generator, r"draw .*\(test_ref.*py:\d+ \(.*\n.*draws .* from a torch\.Generator"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_effects_are_refused_and_the_module_is_as_before(
    body: Callable[[Any, Tensor], Tensor], message: str
) -> None:
    model = nested(body)
    inner: Any = model[1]
    if body is counting:
        inner.calls = 1
    before = [dict(vars(module)) for module in model.modules()]
    streams = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with pytest.raises((rkgb.TraceError, rkgb.UnsupportedOpError), match=message) as caught:
        rkgb.Btools.make_B(model, torch.randn(2, 4, generator=torch.Generator()))
    assert "module '1'" in str(caught.value) or "(1, " in str(caught.value)
    for module, old in zip(model.modules(), before, strict=True):
        assert list(vars(module)) == list(old)
        assert all(value is old[name] for name, value in vars(module).items())
    assert inner.body == [body]
    assert random.getstate() == streams[0]
    assert np.random.get_state()[1].tolist() == streams[1]
    assert torch.equal(torch.get_rng_state(), streams[2])


def count_in_dict(holder: Any) -> int:
    holder.counts["n"] += 1
    return int(holder.counts["n"])


def count_in_list(holder: Any) -> int:
    holder.log[0] += 1
    return int(holder.log[0])


def collect(holder: Any) -> int:
    holder.log.append(1)
    return len(holder.log)


def take_next(holder: Any) -> int:
    return int(next(holder.numbers))


class Reaching(nn.Module):
    """Its forward changes what another module holds, which it calls or not."""

    def __init__(self, change: Callable[[Any], int], *, calls: bool) -> None:
        super().__init__()
        self.change, self.linear = change, nn.Linear(4, 4)
        self.holder: Any = self.linear if calls else nn.Module()
        self.holder.counts, self.holder.log = {"n": 0}, [0]
        self.holder.numbers = iter(range(1, 9))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.change(self.holder)


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("change", [count_in_dict, count_in_list, collect, take_next])
def test_what_a_forward_changes_in_other_modules_is_refused(
    change: Callable[[Any], int], calls: bool
) -> None:
    model = Reaching(change, calls=calls)
    with pytest.raises(rkgb.SideEffectError, match=r"sets it anew|changes what attr|uses attr"):
        rkgb.Btools.make_B(model, torch.randn(2, 4))
    assert (model.holder.counts, model.holder.log, next(model.holder.numbers)) == ({"n": 0}, [0], 1)


def test_the_line_of_an_operation_is_in_the_function_that_calls_it() -> None:
    def helper(m: Any, x: Tensor) -> Tensor:
        return m.linear(x).tanh()

    ops = rkgb.Btools.make_B(nested(helper), torch.randn(2, 4)).ops
    line = helper.__code__.co_firstlineno + 1
    assert [op.target_name for op in ops] == ["t", "addmm", "t", "addmm", "tanh"]
    assert [op.module_path for op in ops] == ["0", "0", "1.linear", "1.linear", "1"]
    assert [op.source for op in ops[2:]] == [f"test_refusals.py:{line}"] * 3


def test_a_number_that_cannot_depend_on_data_is_no_reason_to_refuse() -> None:
    def halved(m: Any, x: Tensor) -> Tensor:
        rows = torch.div(x.size(0), 2, rounding_mode="trunc")
        return m.linear(x).view(rows, -1)

    model, x = nested(halved), torch.randn(2, 4)
    bg = rkgb.Btools.make_B(model, x)
    sg = rkgb.Stools.D_to_S(rkgb.Dtools.B_to_D(bg, model, x))
    assert_same_as_module(sg, model, x)


def test_lazy_modules_are_refused_until_they_have_seen_an_input() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2)), torch.randn(3, 4)
    with pytest.raises(rkgb.TraceError, match=r"run it once .* \(module '1'\)\.\n.*LazyLinear"):
        rkgb.Btools.make_B(model, x)
    model(x)
    assert [op.target_name for op in rkgb.Btools.make_B(model, x).ops] == ["t", "addmm"] * 2


def test_a_forward_that_reads_another_modules_parameters_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    own, calls = model[1], 0

    def counting(x: Tensor) -> Tensor:  # a copy of it would count the calls of the user's
        nonlocal calls
        calls += 1
        return torch.nn.functional.linear(x, own.weight)

    model[1].forward = counting  # type: ignore[method-assign]
    with pytest.raises(rkgb.TraceError, match="sets the variable 'calls'"):
        rkgb.Btools.make_B(model, torch.randn(2, 4))
    assert own.weight.grad is None


class Yielding(nn.Module):
    """Returns a generator, which computes when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
            yield x


def test_a_result_that_cannot_be_copied_is_refused() -> None:
    """It ended in the raw error of `copy.deepcopy`, in the first planned step."""
    with pytest.raises(rkgb.TraceError, match="returns an object of type generator cannot be"):
        rkgb.make_all_graphs(Yielding(), torch.randn(2, 4))
