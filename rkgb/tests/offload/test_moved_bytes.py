"""Memory is as the statements say, however slow the copies are; and that of the process follows."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_cuda.queues import FakeQueues
from oracles.program_memory import SaidMemory
from rkgb.copies import Pinned
from rkgb.device.chosen import device_of, trace_memory
from rkgb.run.program.lowering import lower_step
from runs.moves import Layers, MovingStep, SlowHost, drawn_moves, moves_to_the_backward, steps_of

STEP = MovingStep(Layers(), torch.randn(128, 16))  # storages of whole blocks of CUDA, too


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), most_ms=st.sampled_from((0.0, 0.3, 3.0)), pinned=st.booleans())
def test_peaks_are_those_of_the_statements_however_slow_the_copies(
    seed: int, most_ms: float, pinned: bool
) -> None:
    draw = random.Random(seed)
    steps = steps_of(STEP.graph, draw)
    program = lower_step(STEP.graph, steps, moves=drawn_moves(STEP.graph, steps, draw))
    queues = FakeQueues(lambda: draw.random() * most_ms / 1e3)
    STEP.compile(program, Pinned(queues) if pinned else SlowHost(draw, most_ms))
    tangent = torch.ones_like(STEP.x)

    def run(span: Any) -> None:
        with span("forward"):
            outputs, saved = STEP.forward()
        outputs.clear()
        with span("backward"):
            for gradients in STEP.backward(saved, tangent):
                gradients.clear()

    forward, backward = trace_memory(run, device_of("cpu").where).spans
    measured = forward.peak_bytes, forward.end_bytes, backward.peak_bytes
    assert measured == SaidMemory(STEP.graph, program).peaks()
    assert backward.end_bytes == 0


def test_between_forward_and_backward_only_what_is_not_away_is_there() -> None:
    _, kept, _ = SaidMemory(STEP.graph, lower_step(STEP.graph, STEP.steps)).peaks()
    moves = moves_to_the_backward(STEP.graph, STEP.steps)
    program = lower_step(STEP.graph, STEP.steps, moves=moves)
    _, left, _ = SaidMemory(STEP.graph, program).peaks()
    assert kept - left == program.arena_bytes > kept / 2


_SCRIPT = """
import sys
import torch
from rkgb.copies import Disk
from rkgb.run import MoveOut
from rkgb.run.program.lowering import lower_step
from runs.moves import Layers, MovingStep, moves_to_the_backward

torch.set_num_threads(1)


def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096


def run(program):
    step.compile(program, Disk(sys.argv[1]))
    outputs, saved = step.forward()
    outputs.clear()
    held = resident()
    return held, step.gradients(saved)


step = MovingStep(Layers(6, 64), torch.randn(1 << 14, 64))  # storages of 4 MiB
kept = lower_step(step.graph, step.steps)
moved = lower_step(
    step.graph, step.steps, moves=moves_to_the_backward(step.graph, step.steps)
)
run(moved)  # what is allocated once
before, expected = run(kept)
after, found = run(moved)
assert all(map(torch.equal, found, expected))
away = sum(s.size_bytes for s in moved.forward if isinstance(s, MoveOut))
print(away, before - after)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_the_memory_of_the_process_falls_by_what_has_gone_to_a_file(tmp_path: Path) -> None:
    # With these, glibc gives large blocks back to the system as soon as they are freed.
    settings = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT, str(tmp_path)]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **settings},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    away, less = map(int, run.stdout.split())
    assert away > 50 << 20
    assert abs(less - away) < 4 << 20  # the pages through which copies go, stacks of threads
    assert not list(tmp_path.iterdir())
