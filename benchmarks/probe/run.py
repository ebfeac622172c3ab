"""Run sections, each in a process of its own that is ended at its limit; rows are kept as made.

$ python -m probe.run matrix --device cuda --rows file.jsonl     # one section, in this process
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent
RESULTS = BENCHMARKS / "results"
TOTAL_S = 530.0  # of the sections of one call
Run = Callable[[Sequence[str], dict[str, str], float], str]


def ended(command: Sequence[str], environment: dict[str, str], limit_s: float) -> str:
    """Run a command; return "" or how it ended, with the end of what it said."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own group only
        process.communicate()
        return f"ended after {limit_s:.0f} s"
    return "" if process.returncode == 0 else f"exit code {process.returncode}: {said[-600:]}"


def run_all(
    names: Sequence[tuple[str, float, bool]],
    device: str,
    rows: Path,
    *,
    tiny: bool,
    run: Run = ended,
    clock: Callable[[], float] = time.monotonic,
    total_s: float = TOTAL_S,
) -> None:
    """Run sections (name, seconds, expandable) one after the other; append all rows to a file.

    What has no time left of the total is noted and not started.
    """
    began = clock()
    for name, limit_s, expandable in names:
        left = total_s - (clock() - began)
        if left < 5:
            append(rows, {"section": name, "ended": "not started: the time was over"})
            continue
        command = [sys.executable, "-m", "probe.run", name, "--device", device]
        command += ["--rows", str(rows), *(["--tiny"] if tiny else [])]
        environment = {**os.environ, "PYTHONPATH": _path(), "KINETO_LOG_LEVEL": "99"}
        if expandable:
            environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        start = clock()
        how = run(command, environment, min(limit_s, left))
        append(rows, {"section": name, "ended": how or "ok", "seconds": round(clock() - start, 1)})
        print(f"{name}: {how or 'ok'}", flush=True)


def append(rows: Path, row: object) -> None:
    """Write one row, at once."""
    with rows.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, default=str) + "\n")


def folder_of(device_name: str, results: Path = RESULTS) -> Path:
    """Return where results of a device are kept: "NVIDIA H200" is in results/nvidia-h200."""
    return results / re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def _path() -> str:
    own = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(BENCHMARKS), *([own] if own else [])])


def main(argv: Sequence[str]) -> int:
    """Run one section here."""
    import torch

    from probe.machine import Machine
    from probe.sections import SECTIONS

    by_name = {section.name: section for section in SECTIONS}
    parser = argparse.ArgumentParser()
    parser.add_argument("section", choices=list(by_name))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    flags = parser.parse_args(argv)
    machine = Machine(torch.device(flags.device), flags.tiny)
    for row in by_name[flags.section].run(machine):
        append(flags.rows, {"section": flags.section, **row})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
