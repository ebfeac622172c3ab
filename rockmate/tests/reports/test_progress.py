"""The progress bar of planning: what it says, and that it is never left open."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from tqdm import tqdm

import rkgb
import rockmate
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
    phases = Phases({"first": 1.0, "second": 3.0}, show=True)
    with phases.phase("first"):
        pass
    with phases.phase("second"):
        phases.note("half way")
    phases.close("planned")
    assert set(phases.seconds) == {"first", "second"}
    shown = last_line(capsys.readouterr().err)
    assert "planned" in shown
    assert "100%" in shown


def test_an_error_closes_the_bar_and_names_its_phase(capsys: pytest.CaptureFixture[str]) -> None:
    phases = Phases({"first": 1.0, "second": 1.0, "third": 2.0}, show=True)
    with phases.phase("first"):
        pass
    with pytest.raises(KeyError, match="missing"), phases.phase("second"):
        raise KeyError("missing")
    shown = last_line(capsys.readouterr().err)
    assert "failed: second" in shown
    assert " 25%" in shown
    phases.note("nothing is shown any more")
    phases.close("nor is this")
    assert capsys.readouterr().err == ""
    assert set(phases.seconds) == {"first"}


def test_estimates_show_their_phases(capsys: pytest.CaptureFixture[str]) -> None:
    model, sample = nn.Linear(4, 4), torch.randn(8, 4)
    said = rockmate.estimate(model, sample, device="cpu", points=1, progress=True)
    shown = capsys.readouterr().err
    assert all(f"estimate: {phase}" in shown for phase in ("recording", "costs", "bytes"))
    assert "100%" in last_line(shown)
    assert said.curve
    shown = capsys.readouterr().err
    assert "curve: smallest budget" in shown
    assert "100%" in last_line(shown)
    found = rockmate.largest_batch(
        model, lambda n: torch.randn(n, 4), 900, device="cpu", at_most=9, progress=True
    )
    shown = capsys.readouterr().err
    assert f"search: batch {found.batch}" in shown
    assert "100%" in last_line(shown)
    assert rockmate.estimate(model, sample, device="cpu", progress=False).curve
    with pytest.raises(rkgb.TraceError):
        rockmate.estimate(model, torch.randn(8, 5), device="cpu", progress=True)
    assert "failed: recording" in last_line(capsys.readouterr().err)


def test_an_error_between_two_phases_closes_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    phases = Phases({"first": 1.0, "second": 3.0}, show=True)
    with phases.phase("first"):
        pass
    with pytest.raises(KeyError, match="missing"), phases:
        raise KeyError("missing")
    assert "failed" in last_line(capsys.readouterr().err)


def test_a_bar_shows_what_is_done_inside_a_phase(capsys: pytest.CaptureFixture[str]) -> None:
    phases = Phases({"first": 1.0, "second": 3.0}, show=True)
    with phases.phase("first"):
        phases.note("half way", 0.5)
        assert " 12%" in capsys.readouterr().err
    with phases.phase("second"):
        phases.note("a third", 1 / 3)
        shown = capsys.readouterr().err
        assert "planning: a third" in shown
        assert " 50%" in shown
        assert "<" in shown, "the time that is left"
    phases.close("planned")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("terminal", "rank", "shown"),
    [(True, None, True), (True, "0", True), (True, "1", False), (False, None, False)],
)
def test_a_bar_is_shown_where_a_person_is_looking(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, rank: str | None, shown: bool
) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    Rockmate(nn.Linear(4, 4), torch.randn(3, 4), "1MiB", cost="flops")
    assert ("planned" in screen.getvalue()) is shown


def test_no_bar_is_shown_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    phases = Phases({"first": 1.0}, show=False)
    with pytest.raises(KeyError), phases.phase("first"):
        raise KeyError("missing")
    phases.close("planned")
    assert capsys.readouterr().err == ""


class Printing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        print("here")
        return super().forward(x)


def test_a_refused_module_leaves_no_open_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(rkgb.TraceError):
        Rockmate(Printing(), torch.randn(3, 4), "50%", progress=True, strict=True)
    assert "failed: capture" in last_line(capsys.readouterr().err)
