"""A network whose eager step does not fit is planned and trained all the same, and planning takes
little more than the budget however large the parameters are.

The limit is imposed by the operating system on a process of its own: an allocation above it fails,
whoever asks for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="limits of processes are a matter of POSIX")

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc"),
]


def run(script: str, *numbers: int) -> list[str]:
    """Return the lines that a script has printed."""
    command = [sys.executable, "-W", "ignore", str(HERE / script), *map(str, numbers)]
    # A fixed threshold makes glibc give freed tensors back at once, so that the limit counts them.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.nightly
def test_eager_needs_four_times_the_limit() -> None:
    layers, rows, width = 64, 8192, 256
    # Every layer keeps its input (of the linear operation) and the result of tanh.
    eager_bytes = 2 * layers * rows * width * 4
    assert run("plan_within_a_limit.py", layers, rows, width, eager_bytes // 4) == [
        "eager does not fit",
        "planned True None",
        "trained True",
    ]


def test_planning_takes_the_budget_and_a_twentieth_of_the_parameters() -> None:
    """Bits are compared all the same, and no gradient is left behind."""
    layers, rows, width = 16, 32, 2048
    budget = 24 << 20  # one gradient of 16 MiB is in it, before it is added to the others
    assert run("plan_wide_parameters.py", layers, rows, width, budget) == [
        "planned True True",
        "gradients 0",
        "planned in the middle of training 2",
    ]
