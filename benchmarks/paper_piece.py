"""A piece of the papers' experiments and of the peers, on a GPU, in at most nine minutes.

    $ make gpu-paper              # again and again, until it says that nothing is left
    $ python benchmarks/paper_piece.py --minutes 9 --limit 150

Each experiment skips points whose row is there, so every piece continues where the last one
stopped. Rows of a device are in results/DEVICE. No point is started that might not end in time; one
that takes longer than the limit is a row that says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
EXPERIMENTS = ("Performance", "Peers", "Solvingtime", "Options")
START_S = 20.0  # that an experiment takes before its first point
Run = Callable[[Sequence[str]], int]


def piece(
    arguments: Sequence[str],
    run: Run,
    *,
    total_s: float,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Run experiments until no point can end in time; return those that none was left time for."""
    began, waiting = clock(), []
    for name in EXPERIMENTS:
        left_s = total_s - (clock() - began) - limit_s - START_S
        if left_s <= 0:
            waiting.append(name)
            continue
        script = str(BENCHMARKS / f"{name}_exp.py")
        times = ["--minutes", f"{left_s / 60:.2f}", "--limit", f"{limit_s:g}"]
        run([sys.executable, script, *arguments, *times])
    return waiting


def main(argv: Sequence[str]) -> int:
    """Run one piece; return 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole piece")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of one point")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="points whose description has this text")
    flags = parser.parse_args(argv)

    import torch

    from probe.run import folder_of

    if not torch.cuda.is_available():
        print("there is no GPU here, and the papers' sizes need one")
        return 2
    folder = folder_of(torch.cuda.get_device_name(flags.device))
    arguments = ["--paper", "--device", flags.device, "--out", str(folder), "--only", flags.only]
    waiting = piece(
        arguments,
        lambda command: subprocess.run(command, check=False).returncode,
        total_s=60 * flags.minutes,
        limit_s=flags.limit,
    )
    print(f"not come to: {', '.join(waiting)}" if waiting else "every experiment was come to")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
