"""Moves to memory of the host and to files, by hand and planned, at equal peaks.

    $ python benchmarks/offload.py --folder /a/fast/disk
    $ python benchmarks/offload.py --smoke

The 8-layer GPT and the U-Net. What people write by hand is measured first: hooks on saved tensors
(`torch.autograd.graph.save_on_cpu`, which has no other memory to use on a CPU), and a checkpoint
around every layer whose input is moved. Then Rockmate gets each measured peak as its budget: with
recomputation alone, with moves to the host, and with moves to files. Times are by the wall, because
a step waits for its copies. Peaks are the allocator's; `resident_bytes` is what the process grew
by, which falls for files only. Rows: offload.csv.
"""

from __future__ import annotations

import argparse
import os
import sys

from harness.experiment import main, read_rows
from harness.points import POINT_COLUMNS, RESULT_COLUMNS, STAMP_COLUMNS, Experiment, Options, Point

NETWORKS = {"gpt": {"smoke": 2, "cpu": 2, "paper": 8}, "unet": {"smoke": 2, "cpu": 4, "paper": 50}}
BY_HAND = ("saved tensors", "layer inputs")
PLACES = ("host", "disk")
COLUMNS = (
    *POINT_COLUMNS,
    *RESULT_COLUMNS,
    *("moved_bytes", "waiting_percent", "out_bytes_per_ms", "in_bytes_per_ms"),
    *("resident_bytes", "plain_resident_bytes"),
    *STAMP_COLUMNS,
)


def by_hand(options: Options) -> list[Point]:
    """Return every way by hand, to both places."""
    if options.size == "smoke":
        return [_point(options, "gpt", "layer inputs", "disk")]
    ways = [(way, place) for way in BY_HAND for place in PLACES]
    return [_point(options, network, *way) for network in NETWORKS for way in ways]


def ours(options: Options) -> list[Point]:
    """Return Rockmate at the peaks of the ways by hand; a peak stands for all within 2 % of it."""
    rows = [
        row
        for row in read_rows(options.out / "offload.csv")
        if row["strategy"] in BY_HAND
        and row["status"] == "ok"
        and row["size"] == options.size
        and row["seed"] == str(options.seed)
    ]
    points = []
    for network in NETWORKS:
        peaks: list[int] = []
        for peak in sorted(int(row["peak_bytes"]) for row in rows if row["network"] == network):
            if not peaks or peak > 1.02 * peaks[-1]:
                peaks.append(peak)
        settings = [f"{peak} {place}".strip() for peak in peaks for place in ("", *PLACES)]
        points += [_point(options, network, "rockmate", setting) for setting in settings]
    return points


def _point(options: Options, network: str, strategy: str, setting: str) -> Point:
    batch = NETWORKS[network][options.size]
    return Point("offload", network, options.size, batch, strategy, setting, options.seed)


EXPERIMENTS = (
    Experiment("offload", "measures.training:offloaded", by_hand, COLUMNS),
    Experiment("offload", "measures.training:offloaded", ours, COLUMNS),  # reads rows of the first
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--folder", help="folder for files, on a disk")
    own, sys.argv[1:] = parser.parse_known_args()
    if own.folder:
        os.environ["TMPDIR"] = own.folder
    # What is freed goes back to the system at once, so that the process's size means something.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    sys.exit(main(EXPERIMENTS, f"{__doc__}"))
