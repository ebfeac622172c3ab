"""The runner writes a row for every end that a point can have, and measures nothing twice."""

from __future__ import annotations

import csv
import os
import select
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from harness import experiment
from harness.experiment import Table, Worker
from harness.points import POINT_COLUMNS, Experiment, Options, Point

FAKE = """
import ctypes, os, subprocess, sys, time
from harness.worker import Outcome

def measure(point, device, warmup, repeats):
    way = point["strategy"]
    with open(point["budget"], "a") as file:
        file.write(way + chr(10))
    if way == "infeasible":
        raise Outcome("infeasible", "needs\\n9 bytes", minimum_bytes=9)
    if way == "raises":
        raise RuntimeError("as it was told to")
    if way == "dies":
        print("last words", file=sys.stderr, flush=True)
        os.abort()
    if way == "hangs":
        child = subprocess.Popen(["sleep", "600"])
        with open(point["budget"], "a") as file:
            file.write(f"pid {child.pid}" + chr(10))
        time.sleep(600)
    return {"peak_bytes": 7, "time_ratio": 1.23456789, "pid": os.getpid(), "curve_ms": None}
"""
STAMP = {"commit": "abc", "device": "cpu (test)", "threads": "1", "torch": "0"}


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Worker]:
    (tmp_path / "fake_measures.py").write_text(FAKE, encoding="utf-8")
    worker = Worker(["fake_measures"], [experiment.BENCHMARKS, tmp_path])
    yield worker
    worker.close()


def options(folder: Path) -> Options:
    return Options(
        size="smoke",
        device="cpu",
        out=folder / "rows",
        seed=0,
        warmup=1,
        repeats=2,
        limit_s=20.0,
        minutes=None,
        retry=False,
        only="",
    )


def fake(folder: Path, *ways: str) -> Experiment:
    def points(options: Options) -> list[Point]:
        log = str(folder / "calls.txt")
        return [Point("fake", "net", options.size, 1, way, log, options.seed) for way in ways]

    return Experiment("fake", "fake_measures:measure", points)


def calls(folder: Path) -> list[str]:
    return (folder / "calls.txt").read_text(encoding="utf-8").split()


def by_strategy(rows: list[dict[str, str]]) -> Mapping[str, dict[str, str]]:
    return {row["strategy"]: row for row in rows}


def test_every_end_is_a_row(tmp_path: Path, ask: Worker) -> None:
    ways = ("fine", "infeasible", "raises", "dies")
    experiment.run(fake(tmp_path, *ways), options(tmp_path), ask, STAMP)
    rows = by_strategy(experiment.read_rows(tmp_path / "rows/fake.csv"))
    assert [rows[way]["status"] for way in ways] == ["ok", "infeasible", "failed", "failed"]
    assert rows["fine"]["peak_bytes"] == "7"
    assert rows["fine"]["time_ratio"] == "1.23457"
    assert rows["fine"]["commit"] == "abc"
    assert rows["fine"]["warmup"] == "1"
    assert rows["fine"]["repeats"] == "2"
    assert rows["infeasible"]["minimum_bytes"] == "9"
    assert rows["infeasible"]["message"] == "needs 9 bytes"  # one line
    assert rows["raises"]["message"].startswith("RuntimeError: as it was told to (fake_measures.py")
    assert rows["dies"]["message"] == "ended by signal 6: last words"


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="watches a process as Linux can")
def test_a_point_over_its_time_is_stopped_with_its_children(tmp_path: Path, ask: Worker) -> None:
    short = replace(options(tmp_path), limit_s=1.5)
    (row,) = experiment.run(fake(tmp_path, "hangs"), short, ask, STAMP)
    assert row["status"] == "timeout"
    try:
        handle = os.pidfd_open(int(calls(tmp_path)[-1]))
    except ProcessLookupError:
        return  # it is gone already
    ended, _, _ = select.select([handle], [], [], 20)
    os.close(handle)
    assert ended


def test_measured_points_are_skipped_and_failed_ones_retried_on_request(
    tmp_path: Path, ask: Worker
) -> None:
    first = fake(tmp_path, "fine", "raises")
    experiment.run(first, options(tmp_path), ask, STAMP)
    rows = experiment.run(fake(tmp_path, "fine", "raises", "again"), options(tmp_path), ask, STAMP)
    assert calls(tmp_path) == ["fine", "raises", "again"]
    assert len(rows) == 3
    experiment.run(first, replace(options(tmp_path), retry=True), ask, STAMP)
    assert calls(tmp_path) == ["fine", "raises", "again", "raises"]
    experiment.run(first, options(tmp_path), ask, STAMP | {"device": "cpu (other)"})
    assert calls(tmp_path)[4:] == ["fine", "raises"]
    experiment.run(first, replace(options(tmp_path), seed=1), ask, STAMP)
    assert calls(tmp_path)[6:] == ["fine", "raises"]


def test_only_and_minutes_leave_points_out(tmp_path: Path, ask: Worker) -> None:
    many = fake(tmp_path, "fine", "raises")
    experiment.run(many, replace(options(tmp_path), only="fine"), ask, STAMP)
    assert calls(tmp_path) == ["fine"]
    experiment.run(many, replace(options(tmp_path), minutes=-1.0), ask, STAMP)
    assert calls(tmp_path) == ["fine"]


def test_points_run_in_processes_of_their_own(tmp_path: Path, ask: Worker) -> None:
    (point, *_) = fake(tmp_path, "fine").points(options(tmp_path))
    arguments = {"point": vars_of(point), "device": "cpu", "warmup": 0, "repeats": 0}
    pids = {ask("fake_measures:measure", arguments, 20.0)["result"]["pid"] for _ in range(2)}
    assert len(pids) == 2
    assert ask("fake_measures:nothing", {}, 20.0)["status"] == "failed"


def vars_of(point: Point) -> dict[str, object]:
    return {name: getattr(point, name) for name in POINT_COLUMNS}


def test_a_line_that_was_cut_off_is_dropped_and_columns_may_grow(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    table = Table(path, ["a", "b"])
    table.append({"a": "1", "b": 'with "quotes", commas'})
    table.append({"a": "2", "b": "x"})
    path.write_text(path.read_text(encoding="utf-8") + "3,ha", encoding="utf-8")
    again = Table(path, ["a", "new", "b"])
    again.append({"a": "4", "new": "n", "b": "y"})
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["a", "new", "b"],
        ["1", "", 'with "quotes", commas'],
        ["2", "", "x"],
        ["4", "n", "y"],
    ]


@pytest.mark.parametrize(
    ("strategy", "status", "expected"),
    [
        ("rockmate", "ok", True),
        ("rockmate", "infeasible", True),
        ("rockmate", "failed", False),
        ("rockmate", "refused", False),
        ("rockmate", "timeout", False),
        ("rotor", "refused", True),
        ("rotor", "failed", False),
        ("checkpoint every block", "failed", False),
        ("selective save heavy", "over budget", True),
        ("compile-aot", "failed", True),
        ("checkmate cbc", "timeout", True),
        ("checkmate cbc", "failed", False),
    ],
)
def test_what_counts_as_an_unexpected_failure(strategy: str, status: str, expected: bool) -> None:
    row = {"strategy": strategy, "status": status}
    assert experiment.tolerated(row) is expected
    assert (experiment.summary([row])[1] == []) is expected
