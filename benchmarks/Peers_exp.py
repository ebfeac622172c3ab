"""The peers on one GPT, and Rockmate at the very peak of each of them.

    $ python benchmarks/Peers_exp.py
    $ python benchmarks/Peers_exp.py --smoke

An 8-layer GPT (width 256, 8 x 256 tokens, no dropout, loss inside). Each peer is measured first:
`torch.utils.checkpoint` in all its patterns, selective checkpointing, and `torch.compile` with
`activation_memory_budget`. Then Rockmate gets the measured peak of each as its budget and
minimises FLOPs, which do not depend on the machine. Rows: peers.csv.
"""

from __future__ import annotations

import sys

from harness.experiment import main, read_rows
from harness.points import Experiment, Options, Point

CHECKPOINTS = (
    *("every block", "every 2nd block", "every 4th block"),
    *("first half",),
    *("4 segments", "8 segments"),
    *("perceptron", "attention", "attention and perceptron", "nested"),
)
SELECTIONS = ("save heavy", "save attention", "save every 2nd")
COMPILED = (*((f"0.{n} dp") for n in (1, 2, 3, 4, 5, 6, 8)), *("0.5 ilp", "0.5 greedy"))
INDUCTOR = ("0.3 dp", "0.5 dp", "0.7 dp")
NETWORK, BATCH = "gpt", {"smoke": 2, "cpu": 8, "paper": 8}


def peers(options: Options) -> list[Point]:
    """Return every peer in every setting."""
    ways = [("plain", "")]
    if options.size == "smoke":
        ways += [("checkpoint", "every block"), ("selective", "save heavy")]
    else:
        ways += [("checkpoint", setting) for setting in CHECKPOINTS]
        ways += [("selective", setting) for setting in SELECTIONS]
        ways += [("compile-aot", setting) for setting in COMPILED]
        ways += [("compile", setting) for setting in INDUCTOR]
    return [_point(options, *way) for way in ways]


def ours(options: Options) -> list[Point]:
    """Return Rockmate at every peak that a peer reached below the plain one, smallest first."""
    rows = [
        row
        for row in read_rows(options.out / "peers.csv")
        if row["status"] == "ok"
        and row["size"] == options.size
        and row["seed"] == str(options.seed)
        and row["device"].startswith(options.device.partition(":")[0])
        and row["strategy"] != "rockmate"
    ]
    whole = max((int(row["plain_peak_bytes"]) for row in rows), default=0)
    peaks: list[int] = []
    for peak in sorted({int(row["peak_bytes"]) for row in rows}):
        # where peers are within half a percent of the plain peak, the smaller stands for both
        if peak < 0.98 * whole and (not peaks or peak > peaks[-1] + 0.005 * whole):
            peaks.append(peak)
    return [_point(options, "rockmate", f"{peak} flops") for peak in peaks]


def _point(options: Options, strategy: str, setting: str) -> Point:
    batch = BATCH[options.size]
    return Point("peers", NETWORK, options.size, batch, strategy, setting, options.seed)


EXPERIMENTS = (
    Experiment("peers", "measures.training:step", peers),
    Experiment("peers", "measures.training:step", ours),  # reads the rows of the first
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENTS, __doc__))
