"""What a forward asks the system for, or by names that nobody can know, runs whole."""

from __future__ import annotations

import copy
import cProfile
import gc
import json
import os
import pstats
import re
import resource
import signal
import sqlite3
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from oracles.training import assert_same_gradients
from rkgb.guards import CodeWatch
from rockmate import Rockmate

SCALE = 2.0
LOCK, CONNECTION = threading.Lock(), sqlite3.connect(":memory:")
PLACE = Path("of_the_user.json")
EXPRESSION = compile("SCALE", "<given>", "eval")


def _by_open() -> Any:
    with open(PLACE) as file:  # noqa: PTH123
        return json.load(file)


READS: dict[str, Callable[[], Any]] = {
    "open": _by_open,
    "read_text": lambda: PLACE.read_text(),
    "exists": lambda: PLACE.exists(),
    "os.path.exists": lambda: os.path.exists(PLACE),  # noqa: PTH110
    "listdir": lambda: sorted(Path().iterdir()),
    "np.load": lambda: np.load("array.npy"),
    "torch.load": lambda: torch.load("tensor.pt"),
    "getcwd": lambda: Path.cwd(),
    "time": lambda: time.time(),
    "strftime": lambda: time.strftime("%H"),
    "now": lambda: datetime.now(),
    "a thread's name": lambda: threading.current_thread().name,
    "frames": lambda: sys._getframe().f_globals["SCALE"],
    "references": lambda: sys.getrefcount(PLACE),
    "objects": lambda: len(gc.get_objects()),
    "classes": lambda: nn.Module.__subclasses__(),
    "eval": lambda: eval("SCALE"),
    "eval of code": lambda: eval(EXPRESSION),
    "exec": lambda: exec("SCALE"),
    "globals": lambda: globals()["SCA" + "LE"],
    "the seed": lambda: torch.initial_seed(),
    "signals": lambda: signal.getsignal(signal.SIGINT),
    "how many threads": lambda: threading.active_count(),
    "a lock": lambda: LOCK.locked(),
    "a connection": lambda: CONNECTION.execute("select 2.0").fetchone()[0],
    "what nobody knows": lambda: resource.getrusage(resource.RUSAGE_SELF),
}


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    PLACE.write_text("2.0")
    np.save("array.npy", np.ones(2))
    torch.save(torch.ones(2), "tensor.pt")


@pytest.mark.parametrize("kind", READS)
def test_it_is_seen(kind: str) -> None:
    with CodeWatch(lambda: "path") as watch:
        READS[kind]()
    (seen,) = (seen for seen in watch.seen.values() if seen.outside)
    assert seen.code is READS[kind].__code__


class Named(OrderedDict[str, int]):
    """Has methods that are written in C, also behind one of its own."""

    def values(self) -> Any:
        return super().values()


@pytest.mark.parametrize(
    "does",
    [
        lambda: torch.ones(2).relu(),
        lambda: nn.Linear(2, 2)(torch.ones(2)),
        lambda: json.dumps({"a": 1}),
        lambda: sorted([2, 1], key=lambda v: -v),
        lambda: [*Named(a=1).items(), *Named(a=1).values()],
        lambda: re.sub("a", "b", "a").encode(),
    ],
)
def test_what_asks_for_nothing_is_recorded(does: Callable[[], object]) -> None:
    with CodeWatch(lambda: "path") as watch:
        does()
    assert not any(seen.outside for seen in watch.seen.values())


class Reads(nn.Module):
    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(8, 8), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.read()


def _global() -> Any:
    return globals()["SCA" + "LE"]


def test_a_profiler_that_is_written_in_c_hides_nothing_and_goes_on() -> None:
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), Reads(_by_open))
    x = torch.randn(16, 8)
    with cProfile.Profile() as profile:
        planned = Rockmate(net, x, "1MiB", cost="flops")
        planned(x).sum().backward()
        json.dumps(2.0)
    assert sys.getprofile() is None
    assert planned.plan.opaque == ("3",)
    called = {name for _, _, name in pstats.Stats(profile).stats}  # type: ignore[attr-defined]
    assert "dumps" in called


def test_stacks_of_torchs_profiler_end_where_a_module_is_recorded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    twin, x = copy.deepcopy(net), torch.randn(16, 8)
    with torch.profiler.profile(with_stack=True) as profile:  # nothing can put it back
        planned = Rockmate(net, x, "1MiB", cost="flops")
        planned(x).sum().backward()
    assert "sees no more Python calls of this profile" in caplog.text
    assert any(event.name == "aten::gelu" for event in profile.events())
    twin(x).sum().backward()
    assert_same_gradients(net, twin)


@pytest.mark.parametrize("read", [_by_open, _global])
def test_what_it_gives_may_change_between_steps(
    read: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), Reads(read), nn.Linear(8, 8))
    x = torch.randn(16, 8)
    twin, planned = copy.deepcopy(net), Rockmate(net, x, "1MiB", cost="flops")
    for value in (2.0, 2.0, 2.0, 3.0, 0.5):  # the first are looked at once more
        PLACE.write_text(str(value))
        monkeypatch.setitem(globals(), "SCALE", value)
        for model in (planned, twin):
            model.zero_grad()
            model(x).square().sum().backward()
        grads = [[p.grad for p in model.parameters()] for model in (planned, twin)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True) if a is not None)
    assert len(planned.plans) == 1
