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
from rkgb.testing import assert_same_as_module


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


def assigned(m: Any, x: Tensor) -> Tensor:
    m.total = m.total + x.detach().mean(0)
    return m.linear(x)


def failing(m: Any, x: Tensor) -> Tensor:
    raise KeyError("missing")


def item(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * x.sum().item()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


def custom(m: Any, x: Tensor) -> Tensor:
    return Doubled.apply(m.linear(x))


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (branch, rkgb.DataDependentError, r"control flow .* test_refusals\.py:\d+ \(return m\.lin"),
        (hooked, rkgb.SideEffectError, r"registers a hook .* test_refusals\.py:\d+ \(y\.register_"),
        (
            inner_gradient,
            rkgb.SideEffectError,
            r"calls torch\.autograd\.grad.* outside the",
        ),
        (assigned, rkgb.SideEffectError, r"new tensor to the buffer 'total' .*total\.copy_"),
        (custom, rkgb.UnsupportedOpError, r"'Doubled' at test_refusals\.py:\d+ \(return Doubled"),
        (failing, rkgb.TraceError, r"raised KeyError at test_refusals\.py:\d+ \(raise KeyError"),
        (item, rkgb.DataDependentError, r"'item' \(1, test_refusals\.py:\d+\) .* depends on the"),
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


def test_a_backward_hook_of_a_submodule_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1].register_full_backward_hook(lambda module, grad_in, grad_out: None)
    with pytest.raises(rkgb.UnsupportedOpError, match=r"'1' has a backward hook \(test_ref") as e:
        rkgb.Btools.make_B(model, torch.randn(2, 4))
    assert e.value.module_path == "1"


def test_a_write_to_an_input_names_module_and_line() -> None:
    model = nested(lambda m, x: m.linear(x))
    model = nn.Sequential(nn.ReLU(inplace=True), model)
    bg = rkgb.Btools.make_B(model, torch.randn(2, 4))
    with pytest.raises(rkgb.SideEffectError, match=r"'relu_' \(0, .*\.py:\d+\).*x = x\.clone\(\)"):
        rkgb.Dtools.B_to_D(bg, model, torch.randn(2, 4))


def test_one_cast_with_and_without_gradient_is_refused() -> None:
    def mixed(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                target = m.linear(x)
            return (m.linear(x) - target).float()

    with pytest.raises(rkgb.UnsupportedOpError, match=r"with and without gradient .*cache_enabled"):
        rkgb.Btools.make_B(nested(mixed), torch.randn(2, 4))


def counting(m: Any, x: Tensor) -> Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return m.linear(x)


def setting(m: Any, x: Tensor) -> Tensor:
    m.seen = True
    return m.linear(x)


def keeping(m: Any, x: Tensor) -> Tensor:
    m.last = m.linear(x)
    return m.last * 2


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
        (counting, r"changes the attribute 'calls' \(1 -> 2\) .*\d+ \(m\.calls = getattr"),
        (setting, r"sets the attribute 'seen' of module '1' at test_ref.*py:\d+ \(m\.seen = True"),
        (keeping, r"keeps a tensor in the attribute 'last' .*\d+ \(m\.last = m\.linear\(x\)\)"),
        (collecting, r"changes the attribute 'body' \(list of 1 -> list of 2\) of module '1'"),
        (printing, r"prints \('here'\) at test_refusals\.py:\d+ \(print\(\"here\"\)\) in module"),
        (python_random, r"draws from Python's `random` at test_refusals\.py:\d+ \(scale = 1"),
        (numpy_random, r"draws from numpy's random numbers at test_ref.*:\d+ \(scale = float"),
        (seeding, r"sets the state of torch's .* test_refusals\.py:\d+ \(torch\.manual_seed"),
        (own_generator, r"test_refusals\.py:\d+.*[tT]ype.*Generator"),
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


def test_the_line_of_an_operation_is_in_the_function_that_calls_it() -> None:
    def helper(m: Any, x: Tensor) -> Tensor:
        return m.linear(x).tanh()

    ops = rkgb.Btools.make_B(nested(helper), torch.randn(2, 4)).ops
    line = helper.__code__.co_firstlineno + 1
    assert [op.source for op in ops[1:]] == [f"test_refusals.py:{line}"] * 2


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
    with pytest.raises(rkgb.TraceError, match=r"module '1' \(LazyLinear\) .* Run the model once"):
        rkgb.Btools.make_B(model, x)
    model(x)
    assert len(rkgb.Btools.make_B(model, x).ops) == 2
