"""The loops over many sizes run, and their rows say what happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.experiment import read_rows
from steps import lengths


@pytest.mark.slow
def test_a_tiny_loop_is_measured_step_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lengths.csv"
    assert lengths.main(["--smoke", "--only", "unet", "--out", str(out)]) == 0
    first, *steps = read_rows(out)
    assert first["how"] == "planned"
    assert [row["equal"] for row in steps] == ["True"] * 6
    new = [row for row in steps if row["peak_bytes"]]
    assert len(new) == len({row["shape"] for row in steps}) == 3
    assert {row["how"] for row in new} <= {"resized", ""}
    assert all(int(row["peak_bytes"]) <= int(row["budget_bytes"]) for row in new)
    assert "0 steps with other bits" in capsys.readouterr().out


def test_the_summary_tells_planning_from_steps() -> None:
    def row(shape: str, planned: float, peak: str = "") -> lengths.Row:
        values = {"network": "n", "step": 1, "shape": shape, "how": "resized" if peak else ""}
        times = {"planned_s": planned, "plain_s": 1.0, "equal": True, "budget_bytes": 100}
        return values | times | {"peak_bytes": peak}

    rows = [row("a", 9.0), row("a", 3.2, "90"), row("a", 1.2), row("b", 3.2, "99"), row("b", 1.2)]
    text = lengths.summary(rows)
    assert "all others 45.5 % of the run" in text
    assert "the longest step 3.2; peak 99.0 % of the budget" in text
