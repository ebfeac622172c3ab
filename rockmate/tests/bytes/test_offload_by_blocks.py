"""Blocks that move what they save: the same bits, within the budget, and within what is there."""

from __future__ import annotations

import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rockmate
from oracles.training import (
    assert_same_gradients,
    assert_trains_like,
    eager_copy,
    measured_peak_bytes,
)
from rkgb.copies.workers import HostBlock
from rkgb.engine import trace_memory
from rockmate import BlocksPlan, InfeasibleBudgetError
from rockmate.networks import offload
from rockmate.problems.link import Link
from runs.moves import SlowHost
from runs.places import let_host_be

FAST, SLOW = Link(1e12, 1e12), Link(1e8, 1e8)  # beside times that are from FLOPs


class CountingHost(SlowHost):
    """A host with random delays that counts the bytes of its blocks, those kept idle too."""

    def __init__(self) -> None:
        super().__init__(random.Random(0))
        self.now = self.most = 0

    def new_block(self, size_bytes: int) -> HostBlock:
        block = super().new_block(size_bytes)
        self.now += size_bytes
        self.most = max(self.most, self.now)
        weakref.finalize(block, self._gone, size_bytes)
        return block

    def _gone(self, size_bytes: int) -> None:
        self.now -= size_bytes


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> CountingHost:
    return over(monkeypatch, FAST)


def over(monkeypatch: pytest.MonkeyPatch, link: Link) -> CountingHost:
    """Return a host behind a link of given rates, in place of measured ones."""
    copies = CountingHost()
    let_host_be(copies, link, monkeypatch)
    return copies


class Dropping(nn.Module):
    """A block with a skip, whose chance of dropping is an attribute."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(32, width), nn.Linear(width, 32), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x)).sin()))


class Gated(nn.Module):
    """A block that saves three tensors of the size of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x * torch.sigmoid(x))


class Loss(nn.Module):
    """The mean of squares."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def stack() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    blocks = (Dropping() for _ in range(4))
    return nn.Sequential(*blocks, nn.Linear(32, 4), Loss()), torch.randn(64, 32)


def planned(budget: Any, **options: Any) -> tuple[nn.Module, nn.Module, Tensor, BlocksPlan]:
    """Return a network planned block by block, an eager copy, a sample and the plan."""
    (model, x), how = stack(), {"cost": "flops", "compare": False, "cache": False, **options}
    twin = eager_copy(model)
    how = {"offload": "host", **how}
    return model, twin, x, rockmate.apply_to_blocks(model, x.requires_grad_(), budget, **how)


@pytest.mark.parametrize("link", [FAST, SLOW], ids=["fast", "slow"])
def test_bits_and_bytes_with_random_delays(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    over(monkeypatch, link)
    model, twin, sample, plan = planned(0.45)
    assert any(row.moved_bytes for row in plan.rows)
    assert "B move" in str(plan)
    assert (plan.overhead > 1e-3) == (link is SLOW)  # it waits, or computes again
    assert_trains_like(model, twin, sample)
    peaks = {measured_peak_bytes(model, sample, grads_exist=True) for _ in range(3)}
    assert peaks == {plan.peak_bytes}  # to the byte, however long copies take
    assert plan.peak_bytes == plan.measured_peak_bytes <= plan.budget_bytes
    assert plan.peak_bytes < 0.5 * measured_peak_bytes(twin, sample, grads_exist=True)


@pytest.mark.filterwarnings("ignore:the gradients of Gated")  # they take the 4 bytes outside, too
@pytest.mark.usefixtures("host")
def test_gradients_in_another_layout_stay_within_the_limits_of_each_block() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(64, 8), nn.Sequential(nn.Linear(8, 8), Gated())
    how: dict[str, Any] = {"blocks": ["Gated"], "offload": "host", "compare": False}
    with pytest.raises(InfeasibleBudgetError) as error:
        rockmate.apply_to_blocks(model, x, 1000, **how)
    plan = rockmate.apply_to_blocks(model, x, error.value.minimum_bytes, **how)

    def step() -> None:
        model(x).backward(torch.ones(()).expand(64, 8))

    for _ in range(2):
        step()
    peak = trace_memory(lambda span: step(), torch.device("cpu")).peak_bytes
    assert peak - 4 <= plan.budget_bytes < plan.keeping_all_bytes  # the one is outside


def test_a_fast_link_takes_the_place_of_recomputation(host: CountingHost) -> None:
    still = planned(0.5, offload=None)[3]
    moving = planned(0.5)[3]
    assert moving.keeping_all_bytes == still.keeping_all_bytes  # to which the fraction refers
    assert moving.overhead_ms < 0.1 * still.overhead_ms


def test_what_is_there_is_limited_for_all_blocks_and_forwards_in_flight(host: CountingHost) -> None:
    moved = planned(0.45)[3]
    taken = sum(row.moved_bytes for row in moved.rows)
    host.let_go()
    assert host.now == 0
    for in_flight in (1, 2):
        host.most = 0
        limit = taken * in_flight // 2
        model, twin, sample, plan = planned(0.8, host_budget=limit, in_flight=in_flight)
        assert any(row.moved_bytes for row in plan.rows)
        for net in (model, twin):
            torch.manual_seed(1)
            losses = [net(sample) for _ in range(in_flight)]
            for loss in losses:
                loss.backward()
        assert_same_gradients(model, twin)
        assert 0 < host.most <= limit
        del model, losses, loss
        host.let_go()


def test_a_block_that_needs_more_gets_more_of_what_is_there(host: CountingHost) -> None:
    """No tensor of the wide blocks fits into an equal part."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Dropping(width) for width in (256, 8, 8, 256)), Loss())
    x, limit = torch.randn(64, 32, requires_grad=True), 200_000
    how: dict[str, Any] = {"cost": "flops", "compare": False, "cache": False}
    plan = rockmate.apply_to_blocks(model, x, 0.75, offload="host", host_budget=limit, **how)
    assert max(row.moved_bytes for row in plan.rows) > limit // 4
    assert plan.overhead < 1e-3
    for _ in range(3):
        model(x).backward()
    assert host.most <= limit


def test_the_smallest_budget_is_lower_and_is_taken(host: CountingHost) -> None:
    least = []
    for how in ({}, {"offload": None}):
        with pytest.raises(rockmate.InfeasibleBudgetError) as refused:
            planned(1, **how)
        least.append(refused.value.minimum_bytes)
    assert least[0] <= least[1]
    plan = planned(least[0])[3]
    assert plan.measured_peak_bytes <= least[0]
    with pytest.raises(rockmate.InfeasibleBudgetError, match=f"at least {least[0]} bytes"):
        planned(least[0] - 1)


def test_a_file_keeps_moves_and_rates(host: CountingHost, tmp_path: Path) -> None:
    """Nothing is measured again: the rates of the file serve, on this side's limit."""
    file = tmp_path / "blocks.plan.json"
    made = planned(0.45)[3]
    made.save_plan(file)
    offload._measured.clear()
    model, twin, sample, plan = planned(0.45, plan=file)
    assert [row.moved_bytes for row in plan.rows] == [row.moved_bytes for row in made.rows]
    assert not offload._measured
    assert_trains_like(model, twin, sample)
    with pytest.raises(rockmate.PlanMismatchError, match="offload=None"):
        planned(0.45, plan=file, offload=None)
    with pytest.raises(rockmate.PlanMismatchError, match="bytes elsewhere"):
        planned(0.45, plan=file, host_budget="8Ki")


def test_other_lengths_stay_within_what_each_block_may_hold(host: CountingHost) -> None:
    model, twin, x, plan = planned(0.45)
    shorter = x.detach()[:-7].requires_grad_()
    assert_trains_like(model, twin, shorter)
    assert measured_peak_bytes(model, shorter, grads_exist=True) <= plan.budget_bytes


def test_other_numbers_keep_the_moves(host: CountingHost) -> None:
    model, x = stack()
    twin = eager_copy(model)
    rk = rockmate.Rockmate(model, x, 0.6, offload="host", planner="segments", cache=False)
    assert rk.plan.plan.moves
    for net in (model, twin):
        net[1].drop.p = 0.3  # type: ignore[index, union-attr]
    assert_trains_like(rk, twin, x)
    assert [row.how for row in rk.plans] == ["planned", "recorded"]
    assert measured_peak_bytes(rk, x, grads_exist=True) <= rk.plan.plan.budget_bytes


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(Exception, match="no-such-folder"):
        planned(0.5, offload="disk:/no-such-folder")


def test_the_processes_of_a_machine_share_the_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    over(monkeypatch, FAST)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 16)
    for processes in (4, 16):
        if processes < 16:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        else:
            monkeypatch.delenv("LOCAL_WORLD_SIZE")
        place = offload.offload_of("host", torch.device("cpu"), 100)
        assert place is not None
        assert place.link == Link(1e12 / processes, 1e12 / processes, host_bytes=100)
    known = offload.offload_of("host", torch.device("cpu"), None, SLOW)
    assert known is not None
    assert known.link == SLOW


class Masked(nn.Module):
    """Its mask alone is moved, and comes back before the first step of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.dropout(self.linear(x))
        return found


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(self.lstm(x)[0])
        return found


class Deciding(nn.Module):
    """A root of two blocks, of which the second one gives gradients that lie otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropping, self.last = nn.Linear(8, 8), Masked(), Recurrent()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.mean() > 100:
            x = x * 0.5
        found: Tensor = self.last(x + self.dropping(x))
        return found


def test_planning_ends_where_what_is_moved_comes_back_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over(monkeypatch, Link(1e9, 1e9))
    torch.manual_seed(0)
    model, x = Deciding(), torch.randn(64, 5, 8)
    eager = eager_copy(model)
    with pytest.raises(InfeasibleBudgetError) as refusal:
        rockmate.Rockmate(model, x, 0.7, offload="host")
    rk = rockmate.Rockmate(model, x, refusal.value.minimum_bytes, offload="host")
    assert_trains_like(rk, eager, x)
