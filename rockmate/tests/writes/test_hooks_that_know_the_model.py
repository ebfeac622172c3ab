"""Hooks that set attributes of the whole model, which no copy of it has: a closure knows the model.

Planning leaves none, and each step sets them once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rkgb import RkgbError
from rockmate import InfeasibleBudgetError, Rockmate, apply_to_blocks


class Net(nn.Module):
    seen: Tensor | None

    def __init__(self, hook: str, *, decides: bool) -> None:
        super().__init__()
        self.first, self.last, self.decides = nn.Linear(8, 8), nn.Linear(8, 8), decides
        self.seen, self.log = None, list[int]()
        HOOKS[hook](self)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.first(x))
        if self.decides and x.mean() > 100:
            x = x * 2
        return self.last(x), x


def _counting(net: Net) -> Callable[..., None]:
    return lambda *_: net.log.append(len(net.log))


HOOKS: dict[str, Callable[[Net], Any]] = {
    "forward": lambda net: net.last.register_forward_hook(
        lambda m, ins, out: setattr(net, "seen", out)
    ),
    "forward, listing": lambda net: net.last.register_forward_hook(_counting(net)),
    "pre-hook": lambda net: net.last.register_forward_pre_hook(
        lambda m, ins: setattr(net, "seen", ins[0])
    ),
    "backward": lambda net: net.last.register_full_backward_hook(
        lambda m, ins, outs: setattr(net, "seen", outs[0])
    ),
    "backward, listing": lambda net: net.last.register_full_backward_hook(_counting(net)),
    "gradient": lambda net: net.last.weight.register_hook(
        lambda gradient: setattr(net, "seen", gradient.norm())
    ),
    "gradient, listing": lambda net: net.last.weight.register_hook(
        lambda gradient: net.log.append(len(net.log))
    ),
    "after a gradient": lambda net: net.last.weight.register_post_accumulate_grad_hook(
        _counting(net)
    ),
}


def _apply(net: nn.Module, x: Tensor, *, self_test: bool) -> nn.Module:
    apply_to_blocks(net, x, 10**6, blocks=["Linear"], self_test=self_test)
    return net


def _smallest(net: nn.Module, x: Tensor) -> nn.Module:
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(net, x, 1000, cost="flops")
    return Rockmate(net, x, error.value.minimum_bytes, cost="flops")


WAYS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "Rockmate": lambda net, x: Rockmate(net, x, 10**6),
    "untested": lambda net, x: Rockmate(net, x, 10**6, self_test=False),
    "smallest": _smallest,
    "by blocks": lambda net, x: _apply(net, x, self_test=True),
}


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:hooks of module")  # they keep gradients
@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("way", WAYS)
def test_each_step_sets_them_once(way: str, hook: str, decides: bool) -> None:
    nets = []
    for _ in range(2):  # a deep copy's hooks would know the first one
        torch.manual_seed(0)
        nets.append(Net(hook, decides=decides))
    ours, theirs = nets
    if decides and way == "smallest" and hook in ("forward", "forward, listing", "pre-hook"):
        with pytest.raises(RkgbError):  # no part runs whole with forward hooks of others inside
            WAYS[way](ours, torch.randn(64, 8))
        assert ours.seen is None
        assert not ours.log
        return
    planned = WAYS[way](ours, torch.randn(64, 8))
    for _ in range(4):
        assert ours.log == theirs.log
        assert (ours.seen is None) == (theirs.seen is None)
        assert ours.seen is None or theirs.seen is None or torch.equal(ours.seen, theirs.seen)
        x = torch.randn(64, 8)
        for one in (planned, theirs):
            sum(out.square().mean() for out in one(x)).backward()
    assert_same_gradients(ours, theirs)
    assert ours.log == theirs.log


CALLED: list[Tensor] = []  # a global


@pytest.mark.parametrize("way", WAYS)
def test_planning_puts_back_what_hooks_on_weights_change_outside(way: str) -> None:
    CALLED.clear()
    net = Net("forward", decides=False)
    net.last.weight.register_hook(lambda gradient: CALLED.append(gradient.norm()))
    planned = WAYS[way](net, torch.randn(64, 8))
    assert not CALLED
    for step in range(1, 4):
        sum(out.square().mean() for out in planned(torch.randn(64, 8))).backward()
        assert len(CALLED) == step
