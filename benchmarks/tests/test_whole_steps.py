"""The measurement of whole steps, with one network."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import whole_step


@pytest.mark.nightly
def test_every_loop_of_every_optimizer_stays_within_its_memory(tmp_path: Path) -> None:
    out = tmp_path / "whole_step.csv"
    assert whole_step.main(["--only", "unet", "--size", "smoke", "--out", str(out)]) == 0
    with out.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(whole_step.OPTIMIZERS) * len(whole_step.LOOPS)
    for row in rows:
        asked, predicted = int(row["asked_bytes"]), int(row["predicted_bytes"])
        assert int(row["measured_bytes"]) <= asked
        assert predicted <= asked
        assert float(row["used_percent"]) >= 98, "it recomputes, so activations could use it"
