"""The demo, with one network and as few steps as it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "demo.py"


@pytest.mark.nightly
def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    run = subprocess.run(
        [
            *(sys.executable, str(DEMO), "--only", "resnet50", "--steps", "5"),
            *("--out", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "same bits" in run.stdout
    assert (tmp_path / "demo.png").stat().st_size > 0
