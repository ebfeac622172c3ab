"""Measured times under a clock of our own: the least of several rounds, one visit per kind."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import rkgb
from rkgb.costs import measure as measuring
from rkgb.costs import rounds
from rkgb.costs.measure import Measured, measure
from rkgb.costs.op_costs import FlopCost, op_key
from rkgb.costs.rounds import Timing
from rkgb.device import cpu
from rkgb.elements.op import Op
from rkgb.elements.sample import bind_inputs
from rkgb.graphs.basic import BasicGraph, external_values
from zoo.examples import EXAMPLES, example


class NoisyMachine:
    """A clock that only calls of operations advance: by their time, a jitter, and stalls.

    It stands in for the choice of callees, so that each call takes what the test says.
    """

    def __init__(
        self,
        time_ms: Callable[[Op], float],
        seed: int = 0,
        *,
        jitter: float = 0.02,
        stalls: float = 0.1,
        tells_own_time: bool = False,
    ) -> None:
        self.tells_own_time = tells_own_time
        self.time_ms, self.jitter, self.stalls = time_ms, jitter, stalls
        self.source = random.Random(seed)
        self.now_s = self.own_s = 0.0
        self.threads: set[int] = set()
        self.calls: dict[str, int] = {}
        self.slow_until = 0  # calls of a slow phase: every one takes longer

    def perf_counter(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.own_s if self.tells_own_time else self.now_s

    def choose_callee(self, op: Op, arguments: Callable[[], Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:
            self.calls[op.name] = self.calls.get(op.name, 0) + 1
            factor = 1 + self.source.uniform(0, self.jitter)
            self.own_s += factor * self.time_ms(op) / 1e3
            self.threads.add(torch.get_num_threads())
            if self.source.random() < self.stalls:
                factor *= self.source.uniform(2, 20)
            if sum(self.calls.values()) <= self.slow_until:
                factor *= 5
            self.now_s += factor * self.time_ms(op) / 1e3

        return call

    def measured(
        self, monkeypatch: pytest.MonkeyPatch, name: str, timing: Timing | None = None
    ) -> tuple[BasicGraph, Sequence[Op], Measured]:
        """Measure every operation of an example on this machine."""
        set_clock(monkeypatch, self.perf_counter, self.thread_time)
        monkeypatch.setattr(measuring, "choose_callee", self.choose_callee)
        monkeypatch.setattr(measuring, "_workspaces", lambda benches, *_: dict.fromkeys(benches, 0))
        model, sample = example(name)
        basic = rkgb.Btools.make_B(model, sample)
        leaves = tuple(pytree.tree_leaves(bind_inputs(sample)))
        ops = (*basic.ops, *basic.backward)
        return basic, ops, measure(basic, ops, external_values(basic, model, leaves), timing=timing)


def set_clock(
    monkeypatch: pytest.MonkeyPatch,
    perf_counter: Callable[[], float],
    thread_time: Callable[[], float] | None = None,
) -> None:
    """Let measuring, and the device that it measures on, read another clock."""
    clock = SimpleNamespace(perf_counter=perf_counter, thread_time=thread_time or perf_counter)
    for module in (rounds, cpu):
        monkeypatch.setattr(module, "time", clock)


def of_its_name(op: Op) -> float:
    """Return some time of an operation's kind, in ms: the same for equal kinds."""
    return 0.01 * (1 + sum(map(ord, op.target_name)) % 97)


def calls_of(machine: NoisyMachine) -> int:
    return sum(machine.calls.values())


@pytest.mark.parametrize("seed", range(40))
def test_stalls_do_not_move_the_least(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    machine = NoisyMachine(of_its_name, seed)
    basic, ops, found = machine.measured(monkeypatch, "mixed")
    for op in ops:
        time = found.costs[op_key(op, basic.infos)].time_ms
        assert of_its_name(op) <= time * (1 + 1e-9)
        assert time <= 1.1 * of_its_name(op)


def test_a_slow_phase_of_the_machine_is_outlived(monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls of the first round take five times as long; the rounds go on."""
    quiet = NoisyMachine(of_its_name, jitter=0.0, stalls=0.0)
    kinds = len(
        quiet.measured(monkeypatch, "residual", Timing(min_rounds=1, max_rounds=1))[2].costs
    )
    one_round = calls_of(quiet)
    assert one_round >= 2 * kinds
    machine = NoisyMachine(of_its_name, jitter=0.0, stalls=0.0)
    machine.slow_until = one_round
    basic, ops, found = machine.measured(monkeypatch, "residual", Timing(patience_ms=1e9))
    for op in ops:
        assert found.costs[op_key(op, basic.infos)].time_ms == pytest.approx(of_its_name(op))
    assert found.spread == pytest.approx(0.0)


def test_where_others_have_the_cores_the_own_time_of_one_thread_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nine calls of ten stall: the least of a few is far from the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        machine = NoisyMachine(of_its_name, jitter=0.0, stalls=0.9, tells_own_time=True)
        with caplog.at_level(logging.INFO, logger="rkgb"):
            basic, ops, found = machine.measured(monkeypatch, "residual")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert machine.threads == {1, 2}
    assert "other programs use this machine" in caplog.text
    for op in ops:
        assert found.costs[op_key(op, basic.infos)].time_ms == pytest.approx(of_its_name(op))
    assert found.spread == pytest.approx(0.0)


def test_a_quiet_machine_keeps_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = NoisyMachine(of_its_name, stalls=0.005, tells_own_time=True)
    machine.measured(monkeypatch, "residual")
    assert machine.threads == {torch.get_num_threads()}


def test_a_quiet_machine_is_measured_briefly_and_a_restless_one_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timing = Timing(patience_ms=1e9)
    quiet = NoisyMachine(lambda op: 1.0, jitter=0.0, stalls=0.0)
    quiet.measured(monkeypatch, "averaging", timing)
    few = calls_of(quiet)
    # Each visit: a call that warms up and one that counts, which is longer than a visit may be.
    assert few == 2 * timing.min_rounds * len(quiet.calls)
    falling = NoisyMachine(lambda op: 1.0 / (1 + calls_of(falling)), jitter=0.0, stalls=0.0)
    falling.measured(monkeypatch, "averaging", timing)
    assert few < calls_of(falling) <= timing.most_calls * timing.max_rounds * len(falling.calls)


def test_rounds_end_when_patience_does(monkeypatch: pytest.MonkeyPatch) -> None:
    falling = NoisyMachine(lambda op: 1e3 / (1 + calls_of(falling)), jitter=0.0, stalls=0.0)
    falling.measured(monkeypatch, "averaging", Timing(patience_ms=1.0))
    # The calls are long: after the first visit one call is a visit.
    assert calls_of(falling) == (1 + Timing.min_rounds) * len(falling.calls)


def test_a_later_visit_of_a_long_operation_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = NoisyMachine(lambda op: 2 * Timing.long_ms, jitter=0.0, stalls=0.0)
    basic, ops, found = quiet.measured(monkeypatch, "averaging")
    assert set(quiet.calls.values()) == {1 + Timing.min_rounds}
    for op in ops:
        assert found.costs[op_key(op, basic.infos)].time_ms == pytest.approx(2 * Timing.long_ms)


def test_short_operations_are_called_more_often_within_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timing = Timing(min_rounds=1, max_rounds=1)
    short = NoisyMachine(lambda op: 0.001, jitter=0.0, stalls=0.0)
    short.measured(monkeypatch, "averaging", timing)
    assert set(short.calls.values()) == {timing.most_calls}


def test_equal_operations_are_measured_once_and_share_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    machine = NoisyMachine(of_its_name)
    set_clock(monkeypatch, machine.perf_counter)
    monkeypatch.setattr(measuring, "choose_callee", machine.choose_callee)
    result = rkgb.make_all_graphs(model, torch.randn(4, 8))
    ops = {op.name: op for op in (*result.B_graph.ops, *result.B_graph.backward)}
    called = Counter(ops[name].target_name for name in machine.calls)
    assert called["tanh"] == called["tanh_backward"] == called["addmm"] == 1
    facts, classes = result.inspection.facts, result.inspection.classes
    assert [fact.cost.fwd_time_ms for fact in facts] == [
        *(facts[0].cost.fwd_time_ms, facts[1].cost.fwd_time_ms) * 4
    ]
    # The first layer reads an input and not a value, and is a class of its own.
    assert classes == ((0,), (1, 3, 5, 7), (2, 4, 6))


@pytest.mark.parametrize("name", EXAMPLES)
def test_measuring_changes_nothing(name: str) -> None:
    """Operations write to copies: parameters, buffers, inputs and the random stream stay."""
    model, sample = example(name)
    before = [t.detach().clone() for t in (*model.parameters(), *model.buffers(), *sample)]
    stream = torch.get_rng_state()
    grad_mode = torch.is_grad_enabled()
    basic = rkgb.Btools.make_B(model, sample)
    leaves = tuple(pytree.tree_leaves(bind_inputs(sample)))
    ops = (*basic.ops, *basic.backward)
    found = measure(basic, ops, external_values(basic, model, leaves), timing=Timing(1, 1))
    assert torch.equal(torch.get_rng_state(), stream)
    assert torch.is_grad_enabled() == grad_mode
    now = (*model.parameters(), *model.buffers(), *sample)
    assert all(torch.equal(a, b) for a, b in zip(now, before, strict=True))
    assert set(found.costs) == {op_key(op, basic.infos) for op in ops}


def test_counted_costs_need_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock() -> float:
        raise AssertionError("the clock was read")

    set_clock(monkeypatch, clock)
    model, sample = example("mixed")
    result = rkgb.make_all_graphs(model, sample, cost="flops")
    infos = result.B_graph.infos
    for node, fact in zip(result.S_graph.nodes, result.inspection.facts, strict=True):
        expected = sum(FlopCost().time_ms(op, infos) for op in node.ops)
        assert fact.cost.fwd_time_ms == pytest.approx(expected)


def test_how_sure_the_times_are_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="rkgb"):
        NoisyMachine(of_its_name).measured(monkeypatch, "averaging")
    assert "spread of times" in caplog.text
