"""Measured times under a clock of our own: medians that noise does not move, shared by classes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from rkgb import inspect_op
from rkgb.basic import bind_inputs, external_values, make_B
from rkgb.dataflow import B_to_D
from rkgb.inspect_op import Cost, MeasuredTime, inspect_graph
from rkgb.runner import Runner
from rkgb.simplified import D_to_S

CPU = torch.device("cpu")


class NoisyMachine:
    """A clock that only our runs advance: by their time, a jitter, and now and then a stall."""

    def __init__(self, seed: int, *, jitter: float = 0.02, stalls: float = 0.1) -> None:
        self._draw = random.Random(seed)
        self._jitter, self._stalls = jitter, stalls
        self._now_s = 0.0
        self.runs = 0

    def perf_counter(self) -> float:
        return self._now_s

    def spend(self, time_ms: float) -> None:
        self.runs += 1
        factor = 1 + self._draw.uniform(0, self._jitter)
        if self._draw.random() < self._stalls:
            factor *= self._draw.uniform(2, 20)
        self._now_s += factor * time_ms / 1e3


def measured(
    monkeypatch: pytest.MonkeyPatch, machine: NoisyMachine, fwd_ms: float, bwd_ms: float
) -> Cost:
    monkeypatch.setattr(inspect_op, "time", SimpleNamespace(perf_counter=machine.perf_counter))
    return MeasuredTime(CPU)(
        lambda: None, lambda: machine.spend(fwd_ms), lambda: machine.spend(bwd_ms), 0
    )


@pytest.mark.parametrize(("fwd_ms", "bwd_ms"), [(0.01, 0.02), (1.0, 2.5), (6.0, 12.0)])
def test_stalls_do_not_move_the_median(
    monkeypatch: pytest.MonkeyPatch, fwd_ms: float, bwd_ms: float
) -> None:
    for seed in range(200):
        cost = measured(monkeypatch, NoisyMachine(seed), fwd_ms, bwd_ms)
        assert fwd_ms <= cost.fwd_time_ms <= 1.1 * fwd_ms
        assert bwd_ms <= cost.bwd_time_ms <= 1.1 * bwd_ms


def test_a_quiet_machine_is_measured_briefly_and_a_restless_one_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quiet = NoisyMachine(0, stalls=0.0)
    measured(monkeypatch, quiet, 50.0, 100.0)
    assert quiet.runs == 2 * (1 + MeasuredTime.min_repeats)
    restless = NoisyMachine(0, jitter=5.0, stalls=0.0)
    measured(monkeypatch, restless, 0.5, 1.0)
    assert quiet.runs < restless.runs <= 2 * (1 + MeasuredTime.max_repeats)


def test_equal_nodes_are_measured_once_and_share_their_time() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    sample = torch.randn(4, 8)
    graph = D_to_S(B_to_D(make_B(model, sample), model, sample))
    runner = Runner(graph, CPU)
    leaves = tuple(pytree.tree_leaves(bind_inputs(sample)))
    external = external_values(graph.dataflow.basic, model, leaves)
    times = iter(range(1, 100))  # no two measurements agree

    def source(*_: Any) -> Cost:
        return Cost(float(next(times)), 2.0)

    inspection = inspect_graph(runner, external, source, measure_memory=False)
    found = [fact.cost.fwd_time_ms for fact in inspection.facts]
    # the first layer reads an input and not a value, and is a class of its own
    assert found == [1.0, 2.0, 3.0, 2.0, 3.0, 2.0, 3.0, 2.0]
    assert inspection.classes == ((0,), (1, 3, 5, 7), (2, 4, 6))
