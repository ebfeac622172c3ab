"""What a graph would get wrong is refused, and the message says where it is and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rkgb


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
