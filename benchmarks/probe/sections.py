"""The sections of the probe, in order, each with the seconds that it may take."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from probe import basics, plans
from probe.machine import Machine, Row

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Section:
    """One process of the probe."""

    name: str
    run: Callable[[Machine], Iterator[Row]]
    limit_s: float
    expandable: bool = False  # with expandable segments of the allocator


def gpu_tests(machine: Machine) -> Iterator[Row]:
    """The tests marked `gpu` of the three packages."""
    if not machine.is_cuda:
        yield {"skipped": "they need a GPU"}
        return
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        folders = ["rkgb/tests", "rotor/tests", "rockmate/tests"]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        subprocess.run(
            [*command, f"--junitxml={report}", *folders],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            check=False,
        )
        for case in ET.parse(report).iter("testcase"):
            kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
            row: Row = {"test": case.get("name"), "ended": next(iter(kinds), "passed")}
            for child in case:
                if child.tag in kinds:
                    row["message"] = (child.get("message") or "")[:300]
            yield row


SECTIONS = (
    Section("versions", basics.versions, 30),
    Section("allocator", basics.allocator, 30),
    Section("times", basics.times, 20),
    Section("eager_noise", basics.eager_noise, 80),
    Section("as_users", plans.as_users, 60),
    Section("matrix", plans.matrix, 90),
    Section("matrix_expandable", plans.matrix, 90, expandable=True),
    Section("node_times", plans.node_times, 30),
    Section("ballast", plans.ballast, 30),
    Section("features", plans.features, 30),
    Section("gpu_tests", gpu_tests, 45),
)
