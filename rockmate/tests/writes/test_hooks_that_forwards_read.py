"""Hooks that collect features: the forward reads what a hook of a part has set on the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rkgb import SideEffectError
from rockmate import Rockmate


class Features(nn.Module):
    last: Tensor | None
    features: dict[Any, Tensor]

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 12), nn.Linear(12, 3))
        self.features, self.last, self.calls, self.is_lazy = {}, None, [0], hook == "lazy"
        if not self.is_lazy:
            HOOKS[hook](self)

    def keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.features[inputs[0].device] = output

    def keep_flat(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.features["flat"] = torch.flatten(output * 2, 1)

    def keep_last(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.last = output

    def forward(self, x: Tensor) -> Tensor:
        if self.is_lazy:
            HOOKS["method"](self)
            self.is_lazy = False
        self.features.clear()
        y = self.body(x)
        found = [*self.features.values()] if self.last is None else [self.last]
        self.features.clear()
        return torch.cat([y, *found], 1)


HOOKS: dict[str, Callable[[Features], Any]] = {
    "method": lambda net: net.body[2].register_forward_hook(net.keep),
    "method that computes": lambda net: net.body[2].register_forward_hook(net.keep_flat),
    "method that sets an attribute": lambda net: net.body[2].register_forward_hook(net.keep_last),
    "closure": lambda net: net.body[2].register_forward_hook(
        lambda module, inputs, output: net.features.update(a=output)
    ),
    "closure that computes": lambda net: net.body[2].register_forward_hook(
        lambda module, inputs, output: net.features.update(a=output * 2)
    ),
    "closure over the dict": lambda net: (
        lambda kept: net.body[2].register_forward_hook(
            lambda module, inputs, output: kept.update(a=output)
        )
    )(net.features),
    "closure that sets an attribute": lambda net: net.body[2].register_forward_hook(
        lambda module, inputs, output: setattr(net, "last", output)
    ),
    "pre-hook": lambda net: net.body[2].register_forward_pre_hook(
        lambda module, inputs: net.features.update(a=inputs[0])
    ),
    "beside one that counts": lambda net: (
        net.body[2].register_forward_hook(net.keep),
        net.body[0].register_forward_hook(lambda *_: net.calls.append(len(net.calls))),
    ),
    "lazy": lambda net: None,
}


def pair(hook: str) -> tuple[Features, Features]:
    nets = []
    for _ in range(2):  # a deep copy's closures would know the first one
        torch.manual_seed(0)
        nets.append(Features(hook))
    return nets[0], nets[1]


@pytest.mark.parametrize("self_test", [True, False])
@pytest.mark.parametrize("hook", HOOKS)
def test_forwards_read_what_hooks_have_set(hook: str, self_test: bool) -> None:
    ours, theirs = pair(hook)
    planned = Rockmate(ours, torch.randn(64, 8), 10**6, self_test=self_test)
    assert ours.last is None
    assert not ours.features
    assert len(ours.calls) == 1
    for _ in range(3):
        x = torch.randn(64, 8)
        assert torch.equal(planned(x), theirs(x))
        planned(x).sum().backward()
        theirs(x).sum().backward()
        assert_same_gradients(ours, theirs)
        assert ours.features.keys() == theirs.features.keys()
        assert ours.calls == theirs.calls
        assert (ours.last is None) == (theirs.last is None)
        assert ours.last is None or theirs.last is None or torch.equal(ours.last, theirs.last)


class Keeping(Features):
    """It does not empty the dict: what stays there would have to be set by each step."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return torch.cat([y, *self.features.values()], 1)


def test_a_dict_that_is_not_emptied_is_filled_or_refused_by_name() -> None:
    """A step that runs plain within the budget fills it; a planned one would not."""
    ours, theirs = Keeping("closure"), Keeping("closure")
    theirs.load_state_dict(ours.state_dict())
    with pytest.raises(SideEffectError, match="attribute 'features' leads to"):
        Rockmate(ours, torch.randn(64, 8), 0.5)
    planned = Rockmate(ours, torch.randn(64, 8), 10**6)
    assert not ours.features
    for _ in range(3):
        x = torch.randn(64, 8)
        assert torch.equal(planned(x), theirs(x))
        assert torch.equal(ours.features["a"], theirs.features["a"])
