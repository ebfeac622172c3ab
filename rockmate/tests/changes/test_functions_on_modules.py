"""Functions that users set on modules, as forwards and hooks, and that hold on to the modules."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oracles.training import eager_copy
from runs.planned import wrap


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def _closure(model: nn.Sequential) -> None:
    own, old = model[1], model[1].forward
    own.forward = lambda x: old(x) * own.scale + x


def _closure_twice(model: nn.Sequential) -> None:
    _closure(model)
    _closure(model)


def _default(model: nn.Sequential) -> None:
    model[1].forward = lambda x, old=model[1].forward: old(x) * 2


def _keyword_default(model: nn.Sequential) -> None:
    def forward(x: Tensor, *, own: nn.Module = model[1]) -> Tensor:
        return torch.tanh(own.inner(x)) * own.scale

    model[1].forward = forward


def _partial(model: nn.Sequential) -> None:
    def forward(own: nn.Module, old: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return old(x) * own.scale

    model[1].forward = functools.partial(forward, model[1], model[1].forward)


def _partial_of_closure(model: nn.Sequential) -> None:
    own = model[1]

    def forward(times: int, x: Tensor) -> Tensor:
        return torch.tanh(own.inner(x)) * own.scale * times

    own.forward = functools.partial(forward, 3)


def _functions_that_call_each_other(model: nn.Sequential) -> None:
    own, old = model[1], model[1].forward

    def again(x: Tensor, times: int) -> Tensor:
        return old(x) if times == 0 else again(x, times - 1) * own.scale

    own.forward = lambda x: again(x, 2)


def _hook(model: nn.Sequential) -> None:
    own = model[1]
    model[2].register_forward_hook(lambda _module, _args, result: result * own.scale)


def _checkpoint(model: nn.Sequential) -> None:
    old = model[1].forward
    model[1].forward = lambda *args: checkpoint(old, *args, use_reentrant=False)


@pytest.mark.parametrize(
    "change",
    [
        *(_closure, _closure_twice, _default, _keyword_default, _partial, _partial_of_closure),
        *(_functions_that_call_each_other, _hook, _checkpoint),
    ],
)
def test_they_hold_the_copy_of_which_a_step_is_recorded(
    change: Callable[[nn.Sequential], None],
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Layer() for _ in range(4)]), torch.randn(64, 16)
    twin = eager_copy(model)
    change(model)
    change(twin)
    wrapped = wrap(model, x, 0.99)
    assert not wrapped.plan.opaque
    assert all(p.grad is None for p in model.parameters())
    for _ in range(2):
        result, expected = wrapped(x), twin(x)
        result.square().sum().backward()
        expected.square().sum().backward()
        assert torch.equal(result, expected)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    for ours, theirs in pairs:
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


def test_lists_that_they_fill_are_not_filled_by_planning() -> None:
    model, x = nn.Sequential(*[Layer() for _ in range(2)]), torch.randn(8, 16)
    own, old = model[1], model[1].forward
    own.seen = []

    def forward(value: Tensor) -> Tensor:
        own.seen.append(len(value))
        return old(value)

    own.forward = forward
    wrapped = wrap(model, x, "1MiB")
    assert own.seen == []
    wrapped(x).sum().backward()
    assert "1" in wrapped.plan.opaque
    assert own.seen == [8]
