"""The notebook runs from its first cell to its last, at its smallest size, and draws pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent / "test_rkgb.ipynb"


def code_cells() -> list[str]:
    cells: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_committed_with_what_it_prints() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    printing = [c for c in cells if c["cell_type"] == "code" and "print(" in "".join(c["source"])]
    assert len(printing) > 9
    for cell in printing:
        assert "".join(cell["outputs"][0]["text"]).strip(), "".join(cell["source"])
    pictures = [o for c in printing for o in c["outputs"] if o["output_type"] == "display_data"]
    assert all(o["data"]["image/svg+xml"].startswith("<?xml") for o in pictures)
    assert len(pictures) > 1


@pytest.mark.slow
def test_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first, *rest = code_cells()
    assert first.startswith('SIZE = "small"')
    names: dict[str, Any] = {"__name__": "__main__", "SIZE": "tiny"}
    for number, cell in enumerate(rest):
        exec(compile(cell, f"{NOTEBOOK.name}, code cell {number + 2}", "exec"), names)
    printed = capsys.readouterr().out
    for network in ("GPT2", "ResNet", "MLPMixer", "Transformer"):
        assert f"{network}: " in printed
    assert "22 x layer3.1.conv1 … layer3.22.conv1" in printed
    assert "control flow or a Python number depends on the data" in printed
    ending = "svg" if shutil.which("dot") else "gv"
    assert (tmp_path / f"GPT2_K_graph.{ending}").stat().st_size > 1000
