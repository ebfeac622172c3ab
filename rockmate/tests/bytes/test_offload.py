"""Plans that move: the same bits as plain PyTorch, within the budget, however slow the copies."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rockmate
from fake_cuda.device import fake_cuda
from oracles.training import (
    assert_same_gradients,
    assert_trains_like,
    eager_copy,
    measured_peak_bytes,
)
from rockmate import Rockmate
from rockmate.networks import offload
from rockmate.problems.link import Link
from runs.moves import SlowHost
from runs.places import let_host_be

FAST = Link(1e9, 1e9)
SLOW = Link(2e5, 2e5)


class Block(nn.Module):
    """A block with a skip, a norm, dropout and an activation that is written in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.up(self.norm(x)), inplace=True)
        return x + self.drop(self.down(y))


def blocks(count: int = 4) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(32) for _ in range(count)), nn.Linear(32, 4)), torch.randn(64, 32)


@pytest.fixture(params=["fast", "slow"])
def link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Link:
    """A host with random delays, and a link of given rates in place of measured ones."""
    chosen = FAST if request.param == "fast" else SLOW
    let_host_be(SlowHost(random.Random(0)), chosen, monkeypatch)
    return chosen


@pytest.mark.parametrize("fraction", [0.65, 0.8])
def test_bits_and_bytes_with_random_delays(link: Link, fraction: float) -> None:
    model, x = blocks()
    twin = eager_copy(model)
    rk = Rockmate(model, x, fraction, offload="host", planner="segments")
    plan = rk.plan.plan
    assert plan.moves or link is SLOW  # over which recomputation may be faster
    assert plan.stall_ms <= plan.overhead_ms
    assert_trains_like(rk, twin, x)
    peaks = {measured_peak_bytes(rk, x, grads_exist=True) for _ in range(4)}
    assert len(peaks) == 1, "the peak depends on how long copies take"
    # The gradients of this loss are there a moment later than the plan allows for.
    assert 0.98 * plan.peak_bytes < peaks.pop() <= plan.peak_bytes <= plan.budget_bytes
    # Which plan is the fastest depends on measured times: over a slow link it may move nothing.
    assert (" at most there" if plan.moves else "nothing; it would save no time") in str(rk.plan)


def test_a_link_that_carries_all_takes_the_place_of_recomputation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_host_be(SlowHost(random.Random(0)), FAST, monkeypatch)
    model, x = blocks()
    plan = Rockmate(model, x, 0.4, offload="host", planner="segments").plan.plan
    assert plan.moves
    assert plan.overhead < 0.01


def test_files_on_a_disk(tmp_path: Path) -> None:
    model, x = blocks(3)
    twin = eager_copy(model)
    rk = Rockmate(model, x, 0.5, offload=f"disk:{tmp_path}", planner="segments")
    assert_trains_like(rk, twin, x)
    assert measured_peak_bytes(rk, x, grads_exist=True) <= rk.plan.plan.budget_bytes
    assert not list(tmp_path.iterdir())  # files have no name from their first moment on


def open_files(folder: Path) -> int:
    """Return how many files without a name are open that lay in a folder."""
    return sum(folder in file.resolve().parents for file in Path("/proc/self/fd").iterdir())


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no list of open files here")
def test_a_file_goes_with_the_last_module_that_moves_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = f"disk:{tmp_path}"
    monkeypatch.setattr(offload, "_measured", {(where, torch.device("cpu")): FAST})
    model, x = blocks(3)
    rk: Rockmate | None = Rockmate(model, x, 0.5, offload=where, planner="segments")
    assert rk is not None
    rk(x).sum().backward()
    assert open_files(tmp_path) == 1
    rk = None
    gc.collect()
    assert not open_files(tmp_path)


def test_pinned_memory_goes_with_the_last_module_that_moves_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = blocks(3)
    with fake_cuda() as device:
        monkeypatch.setattr(offload, "_measured", {("host", device.where): FAST})
        rk: Rockmate | None = Rockmate(model, x, 0.5, offload="host", planner="segments")
        assert rk is not None
        rk(x).sum().backward()
        assert len(device.queues.pinned) == 1
        rk = None
        gc.collect()
        assert not device.queues.pinned


def test_several_forwards_before_their_backwards(link: Link) -> None:
    model, x = blocks(3)
    twin = eager_copy(model)
    rk = Rockmate(model, x, 0.5, offload="host", planner="segments")
    for module in (twin, rk):
        torch.manual_seed(1)
        losses = [module(x * scale).square().sum() for scale in (1.0, 2.0, 3.0)]
        for loss in losses[::-1]:
            loss.backward()
    assert_same_gradients(model, twin)


def test_a_second_backward_and_other_gradients(link: Link) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, _ = blocks(3)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.body(x)
            return y, self.head(y)

    torch.manual_seed(0)
    model, x = Two(), torch.randn(64, 32)
    twin = eager_copy(model)
    rk = Rockmate(model, x, 0.75, offload="host", planner="segments")
    for module in (twin, rk):
        torch.manual_seed(1)
        _, second = module(x)
        loss = second.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        module(x)[0].sum().backward()
        with torch.no_grad():
            module(x)
        sum(out.sum() for out in module(x)).backward()
    assert_same_gradients(model, twin)


class Shows(nn.Module):
    """Returns a hidden tensor, without whose gradient the step has fewer storages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.first(x) + x
        x = self.inner(x + (x.round() - x).detach())
        y = (x * 1.0).exp().clamp(max=3) + x
        shown = y.as_strided(y.shape, y.stride()) * 2
        return [self.last(self.gru(shown)[0]), shown]


@pytest.mark.parametrize("fraction", [0.7, 0.8, 0.9])
def test_moves_for_gradients_of_fewer_outputs(link: Link, fraction: float) -> None:
    torch.manual_seed(0)
    model, x = Shows(), torch.randn(64, 5, 8)
    twin = eager_copy(model)
    rk = Rockmate(model, x, fraction, offload="host", planner="recompute_all")
    for places in ((0,), (1,), (0, 1), (0,)):
        for module in (twin, rk):
            outs = module(x)
            sum(outs[place].square().mean() for place in places).backward()
    assert_same_gradients(model, twin)


def test_a_limit_on_the_other_side(link: Link) -> None:
    model, x = blocks()
    rk = Rockmate(model, x, 0.5, offload="host", planner="segments", host_budget="16Ki")
    sizes = {
        m.storage: FAST.host_taken(rk.plan.problem.sizes[m.storage]) for m in rk.plan.plan.moves
    }
    assert sum(sizes.values()) <= 16 << 10


def test_a_file_keeps_moves_and_rates(link: Link, tmp_path: Path) -> None:
    """Nothing is measured again: the rates of the file serve, on this side's limit."""
    file = str(tmp_path / "net.plan.json")
    model, x = blocks()
    made = Rockmate(model, x, 0.65, offload="host", planner="segments")
    made.save_plan(file)
    offload._measured.clear()
    model, x = blocks()
    twin = eager_copy(model)
    rk = Rockmate(model, x, 0.65, offload="host", plan=file)
    assert rk.plan.plan.moves == made.plan.plan.moves
    assert rk.plan.problem.link == link
    assert not offload._measured
    assert_trains_like(rk, twin, x)
    if rk.plan.plan.moves:
        with pytest.raises(rockmate.PlanMismatchError, match="offload=None"):
            Rockmate(blocks()[0], x, 0.65, plan=file)
        with pytest.raises(rockmate.PlanMismatchError, match="bytes elsewhere"):
            Rockmate(blocks()[0], x, 0.65, plan=file, offload="host", host_budget="4Ki")


def test_the_cache_keeps_plans_that_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_host_be(SlowHost(random.Random(0)), FAST, monkeypatch)
    how = {"offload": "host", "planner": "segments", "cache": tmp_path}
    model, x = blocks(3)
    made = Rockmate(model, x, 0.5, **how)
    assert made.plan.plan.moves
    monkeypatch.setattr("rockmate.requests.sources.anew", lambda *_: pytest.fail("planned"))
    model, x = blocks(3)
    twin = eager_copy(model)
    rk = Rockmate(model, x, 0.5, **how)
    assert rk.plan.plan.moves == made.plan.plan.moves
    assert_trains_like(rk, twin, x)


WRONG = {
    "unknown": ({"offload": "tape"}, "offload"),
    "nearly a place": ({"offload": "hosts"}, "offload"),
    "no folder": ({"offload": "disk:"}, "offload"),
    "a limit of nothing": ({"host_budget": "1GB"}, "host_budget= limits"),
    "a fraction there": ({"offload": "host", "host_budget": "50%"}, "fraction"),
    "compiled": ({"offload": "host", "compile": True}, "beside compiled pieces"),
    "in pieces": ({"offload": "host", "split": True}, "beside pieces of rows"),
}


@pytest.mark.parametrize("how", WRONG)
def test_wrong_settings_are_refused(how: str) -> None:
    settings, words = WRONG[how]
    model, x = blocks(1)
    with pytest.raises(rockmate.RockmateError, match=words):
        Rockmate(model, x, 0.5, **settings)


def test_a_folder_that_is_not_there_is_refused() -> None:
    model, x = blocks(1)
    with pytest.raises(Exception, match="no-such-folder"):
        Rockmate(model, x, 0.5, offload="disk:/no-such-folder")
    assert all(p.grad is None for p in model.parameters())


class Deciding(nn.Module):
    """It leaves out its last block if values are small."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        return (self.blocks[2](x) if x.abs().mean().item() > 0.6 else x).square().mean()


def test_blocks_of_a_root_that_decides_move(monkeypatch: pytest.MonkeyPatch) -> None:
    let_host_be(SlowHost(random.Random(0)), FAST, monkeypatch)
    torch.manual_seed(0)
    model, x = Deciding(), torch.randn(64, 32)
    twin = eager_copy(model)
    means: list[float] = []
    twin.blocks[1].register_forward_hook(lambda *a: means.append(a[2].abs().mean().item()))
    rk = Rockmate(model, x, 0.7, offload="host")
    assert any(row.moved_bytes for row in rk.plan.rows)
    for batch in (x, 1e-4 * x[:40], x):  # other decisions, and other lengths
        assert_trains_like(rk, twin, batch)
        peaks = {measured_peak_bytes(rk, batch, grads_exist=True) for _ in range(3)}
        assert len(peaks) == 1
        assert peaks.pop() <= rk.plan.budget_bytes
    assert min(means) < 0.6 < max(means)


def test_a_root_that_decides_says_that_nothing_moves(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    rk = Rockmate(Deciding(), torch.randn(64, 32), 0.9, offload="host", host_budget="1MB")
    assert "nothing moves: offload='host'" in str(rk.plan)
    assert any("offload='host' does nothing for Deciding" in r.message for r in caplog.records)
