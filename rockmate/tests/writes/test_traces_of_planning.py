"""What leaves the process does so as often as in plain PyTorch: once in each step."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rockmate import InfeasibleBudgetError, Rockmate

Leaves = Callable[[], object]


class Part(nn.Module):
    def __init__(self, leaves: Leaves) -> None:
        super().__init__()
        self.inner, self.leaves = nn.Linear(8, 8), leaves

    def forward(self, x: Tensor) -> Tensor:
        self.leaves()
        return torch.relu(self.inner(x))


def _planned(leaves: Leaves, budget: int | float = 1.0) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(8, 8), Part(leaves), nn.Linear(8, 4))
    sample = torch.randn(2, 8)
    return Rockmate(model, (sample,), budget, cost="flops", cache=False, progress=False), sample


def _appended(place: Path) -> Leaves:
    def leaves() -> None:
        with open(place / "text", "a") as file:  # noqa: PTH123 - as users do
            file.write("x")

    return leaves


def _by_path(place: Path) -> Leaves:
    path = place / "text"
    return lambda: path.write_text((path.read_text() if path.exists() else "") + "x")


def _by_flags(place: Path) -> Leaves:
    def leaves() -> None:
        file = os.open(place / "text", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(file, b"x")
        os.close(file)

    return leaves


def _many(place: Path, save: Callable[[Path], object]) -> Leaves:
    return lambda: save(place / f"{len([*place.iterdir()])}")


WRITES: dict[str, Callable[[Path], Leaves]] = {
    "append": _appended,
    "path": _by_path,
    "flags": _by_flags,
    "numpy": lambda place: _many(place, lambda path: np.save(path, np.ones(1))),
    "torch": lambda place: _many(place, lambda path: torch.save({"a": 1}, path)),
}


@pytest.mark.parametrize("name", WRITES)
def test_only_steps_write_files(name: str, tmp_path: Path) -> None:
    planned, sample = _planned(WRITES[name](tmp_path))
    assert not [*tmp_path.iterdir()]
    for step in range(1, 4):
        planned(sample).sum().backward()
        files = [*tmp_path.iterdir()]
        texts = [path.read_text() for path in files if path.name == "text"]
        assert texts == ["x" * step] or len(files) == step


def test_only_steps_set_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCKMATE_COUNT", "0")
    monkeypatch.setenv("ROCKMATE_GOES", "1")

    def leaves() -> None:
        os.environ["ROCKMATE_COUNT"] = str(int(os.environ["ROCKMATE_COUNT"]) + 1)
        os.environ.pop("ROCKMATE_GOES", None)

    planned, sample = _planned(leaves)
    assert (os.environ["ROCKMATE_COUNT"], os.environ["ROCKMATE_GOES"]) == ("0", "1")
    for step in range(1, 4):
        planned(sample).sum().backward()
        assert os.environ["ROCKMATE_COUNT"] == str(step)
        assert "ROCKMATE_GOES" not in os.environ


class Listed(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def logger() -> logging.Logger:
    logger = logging.getLogger("a model's")
    logger.handlers, logger.propagate = [], False
    logger.setLevel("INFO")
    return logger


def test_each_step_logs_as_plain_pytorch(logger: logging.Logger) -> None:
    handler = Listed()
    logger.addHandler(handler)
    planned, sample = _planned(lambda: logger.info("step"))
    assert handler.messages == []
    for step in range(1, 4):
        planned(sample).sum().backward()
        assert handler.messages == ["step"] * step


def test_a_handler_that_comes_later_gets_messages(logger: logging.Logger) -> None:
    planned, sample = _planned(lambda: logger.info("step"), 100_000)  # its part runs whole then
    planned(sample).sum().backward()
    logger.addHandler(handler := Listed())
    planned(sample).sum().backward()
    assert handler.messages == ["step"]


def test_a_message_that_is_said_once_is_said_once(logger: logging.Logger) -> None:
    logger.addHandler(handler := Listed())

    @functools.lru_cache(None)
    def say_once(text: str) -> None:
        logger.info(text)

    for _ in range(2):  # the second time its results are forgotten before
        say_once.cache_clear()
        handler.messages.clear()
        planned, sample = _planned(lambda: say_once("once"))
        for _ in range(3):
            planned(sample).sum().backward()
        assert handler.messages == ["once"]


def test_what_is_printed_to_stderr_is_printed_by_steps(capsys: pytest.CaptureFixture[str]) -> None:
    planned, sample = _planned(lambda: print("step", file=sys.stderr))
    assert "step" not in capsys.readouterr().err
    planned(sample).sum().backward()
    assert capsys.readouterr().err == "step\n"


class Block(nn.Module):
    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 64), nn.Linear(64, 16)
        self.logger = logger

    def forward(self, x: Tensor) -> Tensor:
        self.logger.info("block")
        return x + self.outer(torch.relu(self.inner(x)))


class Deciding(nn.Module):
    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(logger) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if x.sum() > -1e9:
                x = block(x)
        return x


def test_blocks_that_are_computed_again_log_once(logger: logging.Logger) -> None:
    logger.addHandler(handler := Listed())
    model, sample = Deciding(logger), torch.randn(64, 16)
    with pytest.raises(InfeasibleBudgetError) as refused:
        Rockmate(model, (sample,), 1, cost="flops", cache=False, progress=False)
    least = refused.value.minimum_bytes
    planned = Rockmate(model, (sample,), least, cost="flops", cache=False, progress=False)
    assert planned.plan.overhead > 0  # blocks are computed again
    assert handler.messages == []
    planned(sample).sum().backward()
    assert handler.messages == ["block"] * 2
