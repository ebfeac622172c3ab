"""The progress bar of planning: what it says, and that it is never left open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from tqdm import tqdm

import rkgb
from rockmate import Rockmate
from rockmate.progress import Phases


@pytest.fixture(autouse=True)
def _no_bar_is_left_open() -> Iterator[None]:
    assert not open_bars()
    yield
    assert not open_bars()


def open_bars() -> list[object]:
    return list(getattr(tqdm, "_instances", ()))


def last_line(text: str) -> str:
    """What is left on the screen: a bar writes over itself with carriage returns."""
    assert text.endswith("\n")
    return text[:-1].rpartition("\n")[2].rpartition("\r")[2]


class Branching(nn.Module):
    """Cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


def test_a_bar_counts_its_phases(capsys: pytest.CaptureFixture[str]) -> None:
    phases = Phases(("first", "second"), show=True)
    with phases.phase("first"):
        pass
    with phases.phase("second"):
        phases.note("half way")
    phases.close("planned")
    assert set(phases.seconds) == {"first", "second"}
    shown = last_line(capsys.readouterr().err)
    assert "planned" in shown
    assert "2/2" in shown


def test_an_error_closes_the_bar_and_names_its_phase(capsys: pytest.CaptureFixture[str]) -> None:
    phases = Phases(("first", "second", "third"), show=True)
    with phases.phase("first"):
        pass
    with pytest.raises(KeyError, match="missing"), phases.phase("second"):
        raise KeyError("missing")
    shown = last_line(capsys.readouterr().err)
    assert "failed: second" in shown
    assert "1/3" in shown
    phases.note("nothing is shown any more")
    phases.close("nor is this")
    assert capsys.readouterr().err == ""
    assert set(phases.seconds) == {"first"}


def test_an_error_between_two_phases_closes_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    phases = Phases(("first", "second"), show=True)
    with phases.phase("first"):
        pass
    with pytest.raises(KeyError, match="missing"), phases:
        raise KeyError("missing")
    assert "failed" in last_line(capsys.readouterr().err)


def test_no_bar_is_shown_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    phases = Phases(("first",), show=False)
    with pytest.raises(KeyError), phases.phase("first"):
        raise KeyError("missing")
    phases.close("planned")
    assert capsys.readouterr().err == ""


def test_a_refused_module_leaves_no_open_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(rkgb.TraceError):
        Rockmate(Branching(), torch.randn(3, 4), "50%", progress=True)
    assert "failed: capture" in last_line(capsys.readouterr().err)
