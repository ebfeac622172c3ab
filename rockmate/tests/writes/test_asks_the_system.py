"""A forward that changes files, or starts processes: planning does neither."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rkgb.errors import NoStepError
from rockmate import Rockmate


class Net(nn.Module):
    def __init__(self, does: Callable[[], object]) -> None:
        super().__init__()
        self.first, self.second, self.does = nn.Linear(8, 8), nn.Linear(8, 4), does

    def forward(self, x: Tensor) -> Tensor:
        self.does()
        found: Tensor = self.second(torch.tanh(self.first(x)))
        return found


def _planned(does: Callable[[], object]) -> Rockmate:
    return Rockmate(Net(does), (torch.randn(6, 8),), 1.0, cost="flops", cache=False, progress=False)


def _names(place: Path) -> list[str]:
    return sorted(one.name for one in place.iterdir())


CHANGES: dict[str, Callable[[Path], object]] = {
    "a folder": lambda place: (place / f"made{len(_names(place))}").mkdir(),
    "a file that goes": lambda place: next(place.glob("there*")).unlink(),
    "another name": lambda place: next(place.glob("there*")).rename(place / "moved"),
    "a link": lambda place: (place / f"link{len(_names(place))}").symlink_to("there0"),
    "a command": lambda place: os.system(f"touch {place}/ran$(ls {place} | wc -l)"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_files_are_changed_by_steps_only(name: str, tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"there{number}").touch()
    before = _names(tmp_path)
    planned = _planned(lambda: CHANGES[name](tmp_path))
    assert planned.plan.opaque
    assert _names(tmp_path) == before
    found = [before]
    for _ in range(2):
        planned(torch.randn(6, 8)).sum().backward()
        found.append(_names(tmp_path))
    plain = tmp_path / "plain"
    plain.mkdir()
    for number in range(5):
        (plain / f"there{number}").touch()
    for _ in range(2):
        CHANGES[name](plain)
    assert found[0] != found[1]
    assert _names(plain) == found[2]


def _connect() -> None:
    with socket.socket() as made:
        made.connect(("127.0.0.1", 9))


STARTS: dict[str, Callable[[], object]] = {
    "a process": lambda: subprocess.run([sys.executable, "-c", ""]),
    "a fork": lambda: os.fork() or os._exit(0),
    "a connection": _connect,
}


@pytest.mark.parametrize("name", STARTS)
def test_what_starts_something_is_refused_before(name: str) -> None:
    with pytest.raises(NoStepError, match=r"test_asks_the_system.py:\d+"):
        _planned(STARTS[name])
