"""The probe of a GPU, on a CPU: sections run and end at their limits, rows are kept and told."""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import gpu_probe
import paper_piece
from probe.machine import Machine
from probe.run import TOTAL_S, append, ended, folder_of, run_all
from probe.sections import GPU_TESTS, SECTIONS, rows_of_tests
from probe.table import failures, read, table
from probe.wheels import find_packages, unpacked

LONG = ("as_users", "matrix", "node_times")  # sections
CPU = Machine(torch.device("cpu"), tiny=True)


@pytest.mark.parametrize("call", [1, 2])
def test_the_sections_of_a_call_take_less_than_nine_minutes(call: int) -> None:
    assert 0 < sum(s.limit_s for s in SECTIONS if s.call == call) <= TOTAL_S < 9 * 60


def test_the_tests_that_are_named_are_those_for_a_gpu() -> None:
    root = Path(gpu_probe.__file__).resolve().parents[1]
    folders = [root / name / "tests" for name in ("rkgb", "rotor", "rockmate")]
    files = {f for folder in folders for f in folder.rglob("test_*.py") if _is_for_gpu(f)}
    assert {str(f.relative_to(root)) for f in files} == set(GPU_TESTS)
    for file in files:
        functions = [n for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef)]
        named = {f.name for f in functions if f.name.startswith("test_")}
        assert named == set(GPU_TESTS[str(file.relative_to(root))])


def _is_for_gpu(file: Path) -> bool:
    return "pytest.mark.gpu" in file.read_text(encoding="utf-8")


def test_tests_are_told_as_they_end() -> None:
    said = [
        "rotor/tests/test_gpu.py::test_a PASSED    [  1%]",
        "rockmate/tests/bits/test_gpu_bits.py::test_b[cuda-x y] FAILED  [ 2%]",
        "=== short test summary info ===",
        "FAILED rockmate/tests/bits/test_gpu_bits.py::test_b[cuda-x y] - AssertionError: no",
    ]
    rows = list(rows_of_tests(said))
    assert [row.get("ended") for row in rows] == ["passed", "failed", None]
    assert rows[2]["message"] == "AssertionError: no"
    assert len(failures([{"section": "gpu_tests", **row} for row in rows])) == 1


def test_wheels_are_found_without_being_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match=r"docs/how-to/gpu\.md"):
        unpacked(tmp_path)
    with zipfile.ZipFile(tmp_path / "brought-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("brought_by_wheel.py", "VALUE = 7")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "before")
    for _ in range(2):
        find_packages(tmp_path)
    assert importlib.import_module("brought_by_wheel").VALUE == 7
    places = os.environ["PYTHONPATH"].split(os.pathsep)
    assert places[0] == str(tmp_path / "unpacked")
    assert places[-1] == "before"


@pytest.mark.slow
def test_a_probe_of_the_cpu_finds_nothing_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    names = ["versions", "ballast"]  # the others run in one process, below
    code = gpu_probe.main(["--device", "cpu", "--tiny", "--rows", str(rows), "--only", *names])
    told = capsys.readouterr().out
    assert code == 0, told
    assert "nothing failed" in told
    assert [row["section"] for row in read(rows) if "ended" in row] == names


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(s.name, marks=[pytest.mark.nightly] * (s.name in LONG))
        for s in SECTIONS
        if not s.expandable
    ],
)
def test_every_section_runs_on_a_cpu(name: str) -> None:
    section = next(s for s in SECTIONS if s.name == name)
    rows = [{"section": name, **row} for row in section.run(CPU)]
    assert rows
    assert not failures(rows)
    json.dumps(rows)
    for row in rows:
        assert row.get("differing", 0) == 0  # eager repeats its bits on a CPU, and plans have them
        assert row.get("allocated_bytes", 0) <= row.get("budget_bytes", 0) or "kept_by" in row


def test_a_section_is_ended_at_its_limit_and_its_rows_stay(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    code = f'open({str(rows)!r}, \'a\').write(\'{{"section": "a", "x": 1}}\\n\')'
    sleep = [sys.executable, "-c", f"{code}; import time; time.sleep(600)"]

    def run(_command: Sequence[str], environment: dict[str, str], limit_s: float) -> str:
        return ended(sleep, environment, min(limit_s, 3))

    run_all([("a", 1000.0, False)], "cpu", rows, tiny=True, run=run)
    first, last = read(rows)
    assert first == {"section": "a", "x": 1}
    assert last["ended"] == "ended after 3 s"
    assert failures([first, last])


def test_what_fails_and_what_has_no_time_left_is_told(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    now = [0.0]

    def run(command: Sequence[str], environment: dict[str, str], limit_s: float) -> str:
        assert ("PYTORCH_CUDA_ALLOC_CONF" in environment) == ("b" in command)
        now[0] += limit_s
        return "" if "b" in command else "exit code 1: Traceback"

    sections = [("a", 60.0, False), ("b", 1000.0, True), ("c", 10.0, False)]
    run_all(sections, "cpu", rows, tiny=True, run=run, clock=lambda: now[0], total_s=100.0)
    append(rows, {"section": "b", "budget_bytes": 10, "allocated_bytes": 12})
    with rows.open("a") as file:
        file.write('{"section": "cut o')
    found = read(rows)
    assert [row["ended"] for row in found[:3]] == [
        "exit code 1: Traceback",
        "ok",
        "not started: the time was over",
    ]
    wrong = failures(found)
    assert len(wrong) == 3
    assert "2 bytes over the budget" in wrong[-1]
    assert "b: ok (40.0 s)" in table(found)


def test_folders_are_named_for_the_device() -> None:
    assert folder_of("NVIDIA H200 141GB").name == "nvidia-h200-141gb"


def test_a_piece_of_the_papers_starts_nothing_that_might_not_end_in_time() -> None:
    now, commands = [0.0], []

    def run(command: Sequence[str]) -> int:
        commands.append(command)
        minutes = float(command[command.index("--minutes") + 1])
        limit = float(command[command.index("--limit") + 1])
        now[0] += 60 * minutes + limit if "Performance" in command[1] else 30.0
        return 0

    def take() -> list[str]:
        return paper_piece.piece(
            ["--paper"], run, total_s=540.0, limit_s=150.0, clock=lambda: now[0]
        )

    assert take() == ["Peers", "Solvingtime", "Options"]
    assert now[0] <= 540.0
    assert "--paper" in commands[0]


def test_without_a_gpu_nothing_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert gpu_probe.main([]) == 2
    assert paper_piece.main([]) == 2
    assert "there is no GPU here" in capsys.readouterr().out
