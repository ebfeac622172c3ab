"""Hooks of parts that look at values (logs, checks, clipping): whatever calls a part runs them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients, measured_peak_bytes
from rkgb import DataDependentError
from rockmate import Rockmate

Log = list[Any]


class Layer(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def layers() -> nn.Sequential:
    return nn.Sequential(*[Layer() for _ in range(5)])


def on_layers(model: nn.Module, hook: Callable[..., Any]) -> None:
    for layer in model.children():
        layer.register_forward_hook(hook)


def logging(model: nn.Module, log: Log) -> None:
    on_layers(model, lambda _m, _i, out: log.append(out.std().item()))


def keeping_on_the_layer(model: nn.Module, log: Log) -> None:
    def hook(layer: Any, _: Any, out: Tensor) -> None:
        layer.mean = out.mean().item()
        log.append(layer.mean)

    on_layers(model, hook)


def of_arguments(model: nn.Module, log: Log) -> None:
    for layer in model.children():
        layer.register_forward_pre_hook(lambda _m, given: log.append(given[0].mean().item()))


def by_numpy(model: nn.Module, log: Log) -> None:
    on_layers(model, lambda _m, _i, out: log.append(out.detach().numpy().sum().item()))


def checking(model: nn.Module, log: Log) -> None:
    def hook(_m: Any, _i: Any, out: Tensor) -> None:
        if torch.isnan(out).any():
            raise RuntimeError("not a number")
        log.append(len(log))

    on_layers(model, hook)


def clipping(model: nn.Module, log: Log) -> None:
    def hook(_m: Any, _i: Any, out: Tensor) -> Tensor | None:
        most = out.detach().abs().max()
        if most <= 0.5:
            return None
        log.append(most.item())
        return out.clamp(-0.5, 0.5)

    on_layers(model, hook)


def of_gradients(model: nn.Module, log: Log) -> None:
    def hook(_m: Any, _i: Any, out: Tensor) -> None:
        out.register_hook(lambda gradient: log.append(gradient.norm().item()))

    on_layers(model, hook)


def of_one(model: nn.Module, log: Log) -> None:
    model.get_submodule("2").register_forward_hook(
        lambda _m, _i, out: log.append(out.detach().mean(0).tolist())
    )


def inside_of_one(model: nn.Module, log: Log) -> None:
    model.get_submodule("2.1").register_forward_hook(
        lambda _m, _i, out: log.append(out.detach().mean().item())
    )


HOOKS = (
    *(logging, keeping_on_the_layer, of_arguments, by_numpy, checking, clipping, of_gradients),
    *(of_one, inside_of_one),
)


@pytest.mark.parametrize("budget", [1.0, 0.7])
@pytest.mark.parametrize("add", HOOKS)
def test_hooks_that_look_at_values_run_once_a_step(
    add: Callable[[nn.Module, Log], None], budget: float
) -> None:
    torch.manual_seed(0)
    plain = layers()
    model = copy.deepcopy(plain)
    ours, theirs = list[Any](), list[Any]()
    add(model, ours)
    add(plain, theirs)
    rk = Rockmate(model, torch.randn(32, 16), budget, cost="flops", progress=False)
    assert not ours, "planning has left something"
    for _ in range(3):
        x, target = torch.randn(32, 16), torch.randn(32, 16)
        results = []
        for module in (rk, plain):
            module.zero_grad()
            results.append(module(x))
            nn.functional.mse_loss(results[-1], target).backward()
        assert torch.equal(*results)
        assert_same_gradients(model, plain)
        assert ours == theirs


def test_steps_with_such_hooks_stay_within_the_budget() -> None:
    torch.manual_seed(0)
    model = layers()
    log: Log = []
    logging(model, log)
    x = torch.randn(64, 16)
    whole = measured_peak_bytes(model, (x,), grads_exist=True)
    rk = Rockmate(model, x, 0.7, cost="flops", progress=False)
    assert measured_peak_bytes(rk, (x,), grads_exist=True) <= rk.budget_bytes < 0.75 * whole


def of_every_layer(model: nn.Module, log: Log) -> None:
    for module in model.modules():
        if not [*module.children()]:
            module.register_forward_hook(lambda _m, _i, out: log.append(out.sum().item()))


def test_where_no_part_can_save_memory_it_runs_plain_within_the_budget(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = layers()
    model, sample = copy.deepcopy(plain), torch.randn(32, 16)
    ours, theirs = list[Any](), list[Any]()
    of_every_layer(model, ours)
    of_every_layer(plain, theirs)
    with pytest.raises(DataDependentError, match=r"test_hooks_that_decide.py.* in module '0.0'"):
        Rockmate(model, sample, 0.9, cost="flops", progress=False)
    assert not ours
    rk = Rockmate(model, sample, 1.0, cost="flops", progress=False)
    assert "Sequential saves no memory" in caplog.text
    for rows in (32, 32, 16):
        x = torch.randn(rows, 16)
        for module in (rk, plain):
            module.zero_grad()
            module(x).square().mean().backward()
        assert_same_gradients(model, plain)
        assert ours == theirs
    assert rk.plan.rows == ()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y * 0.5 if y.mean() > 100 else y


def test_planning_calls_no_hook_of_a_parameter() -> None:
    def fail(_: Tensor) -> None:
        raise ValueError("as was asked")

    model = Branching()
    parameters = [*model.parameters()]
    handles = [
        parameters[0].register_hook(fail),
        parameters[1].register_post_accumulate_grad_hook(fail),
    ]
    rk = Rockmate(model, torch.randn(64, 16), 0.9)
    for size in (64, 48):  # the second one is planned in a call
        y = rk(torch.randn(size, 16))
        with pytest.raises(ValueError, match="as was asked"):
            y.sum().backward()
    for handle in handles:
        handle.remove()
    rk(torch.randn(48, 16)).sum().backward()
