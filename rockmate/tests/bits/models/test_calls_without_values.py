"""Calls of a planned module that are for a graph or a shape, and hooks for every module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.utils.flop_counter import FlopCounterMode

import rockmate
from oracles.training import assert_same_gradients
from runs.planned import wrap


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def _planned(how: str, x: Tensor) -> nn.Module:
    if how == "Rockmate":
        return wrap(_model(), x, 1.0)
    return rockmate.apply(_model(), x, 1.0, cost="flops", effort="fast")


def _trains_as_plain(planned: nn.Module, x: Tensor) -> None:
    twin = _model()
    for module in (planned, twin):
        module.zero_grad()
        module(x).square().mean().backward()
    assert_same_gradients(planned, twin)


# Torch's own, of a view of a weight, when it makes a fake tensor of it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("how", ["Rockmate", "apply"])
def test_tensors_without_content_run_the_plain_module(how: str) -> None:
    x = torch.randn(8, 16)
    planned = _planned(how, x)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        made = planned(mode.from_tensor(x))
    assert made.shape == x.shape
    outside = planned(mode.from_tensor(torch.randn(4, 16)))
    assert type(outside).__name__ == "FakeTensor"
    assert outside.shape == (4, 16)
    _trains_as_plain(planned, x)


@pytest.mark.parametrize("how", ["Rockmate", "apply"])
def test_export_sees_the_plain_module(how: str) -> None:
    x = torch.randn(8, 16)
    planned = _planned(how, x)
    exported = torch.export.export(planned, (x,), strict=False)
    assert torch.equal(exported.module()(x), _model()(x))
    _trains_as_plain(planned, x)


def test_a_trace_of_its_operations_is_that_of_the_plain_module() -> None:
    x = torch.randn(8, 16)
    planned = wrap(_model(), x, 1.0)
    traced = make_fx(planned)(x)
    plain = make_fx(_model())(x)
    ours, theirs = (
        [n.target for n in g.graph.nodes if n.op == "call_function"] for g in (traced, plain)
    )
    assert ours == theirs
    _trains_as_plain(planned, x)


def test_a_flop_counter_around_planning_and_steps_counts_the_step() -> None:
    x = torch.randn(8, 16)
    planned = wrap(_model(), x, 1.0)
    with FlopCounterMode(display=False) as plain:
        _model()(x).square().mean().backward()
    for size in (8, 8, 4, 4):  # the first of a size may record or plan, which is no part of a step
        with FlopCounterMode(display=False) as counter:
            planned(torch.randn(size, 16)).square().mean().backward()
    assert counter.get_total_flops() * 2 == plain.get_total_flops()


def _doubled(_module: nn.Module, _args: Any, made: Any) -> Any:
    return made * 2


def _shifted(_module: nn.Module, args: Any) -> Any:
    return tuple(arg + 1 for arg in args)


def _halved(_module: nn.Module, grads: Any, _made: Any) -> Any:
    return tuple(None if grad is None else grad / 2 for grad in grads)


@pytest.mark.parametrize(
    ("register", "hook"),
    [
        (register_module_forward_hook, _doubled),
        (register_module_forward_pre_hook, _shifted),
        (register_module_full_backward_hook, _halved),
    ],
)
def test_hooks_for_every_module_are_called_for_every_module(register: Any, hook: Any) -> None:
    x = torch.randn(8, 16, requires_grad=True)
    planned = wrap(_model(), x, 1.0)
    twin = copy.deepcopy(_model())
    handle = register(hook)
    try:
        for module in (planned, twin):
            module.zero_grad()
            if module is planned:
                with pytest.warns(RuntimeWarning, match="a hook for every module"):
                    made = module(x)
            else:
                made = module(x)
            made.square().mean().backward()
        assert_same_gradients(planned, twin)
    finally:
        handle.remove()
    _trains_as_plain(planned, x)


def test_planning_under_hooks_for_every_module_does_not_call_them() -> None:
    seen: list[nn.Module] = []
    handle = register_module_forward_hook(lambda module, _args, _made: seen.append(module))
    try:
        model = _model()
        wrap(model, torch.randn(8, 16), 1.0)
    finally:
        handle.remove()
    assert seen == []
