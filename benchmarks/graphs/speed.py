"""How long graphs take to build, against torch.export in the same run.

$ python -m graphs.speed            # GPT-2 of 12, 24, 48 and 96 layers, some minutes
$ python -m graphs.speed --smoke    # 2 and 4 layers, printed only

The full run writes benchmarks/results/rkgb_speed.csv and the table of rkgb's README.

B, D and S are built without measuring anything, and hold the backward too; what torch.export makes
is a forward. Every pair of times comes from one process, the two
alternating, and the smallest of the repeats counts: a shared machine only ever adds time. Times are
of the processor, in one thread: nothing here waits for anything.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import io
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import rkgb
from models.GPT import GPT2
from reports.readme import write_part

RESULTS = Path(__file__).resolve().parent.parent / "results" / "rkgb_speed.csv"


def network(layers: int) -> tuple[GPT2, Tensor]:
    """Return a narrow GPT-2 in train mode: building graphs should not be about multiplying."""
    torch.manual_seed(0)
    model = GPT2(nlayers=layers, d_model=64, n_heads=4, vocab=128, max_length=32)
    return model.train(), torch.randint(128, (1, 16))


def export(model: GPT2, sample: Tensor) -> None:
    """Make the graph that torch itself offers, for comparison."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.export.export(model, (sample,), strict=False)


def build(model: GPT2, sample: Tensor) -> None:
    """Build B, D, S and the blocks."""
    bg = rkgb.Btools.make_B(model, sample)
    dg = rkgb.Dtools.B_to_D(bg, model, sample)
    rkgb.Stools.cut(rkgb.Stools.D_to_S(dg, model))


def seconds(run: Callable[[GPT2, Tensor], None], model: GPT2, sample: Tensor) -> float:
    """Return the processor time of one run."""
    gc.collect()
    start = time.process_time()
    run(model, sample)
    return time.process_time() - start


@dataclass(frozen=True, slots=True)
class Row:
    """One depth: the smallest times of the repeats."""

    layers: int
    export_s: float
    build_s: float

    @property
    def ratio(self) -> float:
        return self.build_s / self.export_s

    @property
    def ms_per_layer(self) -> float:
        return 1e3 * self.build_s / self.layers


def measure(layers: int, repeats: int) -> Row:
    """Time both in turns."""
    model, sample = network(layers)
    pairs = [
        (seconds(export, model, sample), seconds(build, model, sample)) for _ in range(repeats)
    ]
    alone, ours = (min(times) for times in zip(*pairs, strict=True))
    return Row(layers, alone, ours)


def device() -> str:
    """Return the machine in words."""
    return f"{os.cpu_count()}-core CPU ({platform.machine()}), one thread"


def save(rows: list[Row], repeats: int, path: Path) -> None:
    """Write the rows, and what they were measured with, as CSV."""
    stamp = {"device": device(), "torch": torch.__version__, "repeats": str(repeats)}
    with path.open("w", encoding="utf-8", newline="") as file:
        names = ["layers", "export_s", "build_s", *stamp]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            times = {"export_s": f"{row.export_s:.4f}", "build_s": f"{row.build_s:.4f}"}
            writer.writerow({"layers": row.layers, **times, **stamp})


def load(path: Path) -> tuple[list[Row], dict[str, str]]:
    """Read what `save` wrote: the rows, and what they were measured with."""
    with path.open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    rows = [Row(int(r["layers"]), float(r["export_s"]), float(r["build_s"])) for r in table]
    return rows, table[0]


def text_of(rows: list[Row], stamp: dict[str, str]) -> str:
    """Return the table as Markdown, with one sentence that says what it shows."""
    first, last = rows[0], rows[-1]
    lines = [
        f"Graphs of a GPT-2 of {first.layers} layers take {first.ratio:.2f} times as long as "
        f"`torch.export` in the same run, which makes no backward; {last.layers} layers take "
        f"{last.ms_per_layer / first.ms_per_layer:.2f} times as long per layer as {first.layers}. "
        f"Measured on: {stamp['device']}, torch {stamp['torch']}, processor time, the best of "
        f"{stamp['repeats']} runs in turns.",
        "",
        "| layers | `torch.export` | B, D, S, blocks | ratio | per layer |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {r.layers} | {r.export_s:.2f} s | {r.build_s:.2f} s | {r.ratio:.2f} | "
        f"{r.ms_per_layer:.0f} ms |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> int:
    """Print one row per depth; write the results after a full run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small depths, one repeat")
    parser.add_argument("--layers", type=int, nargs="+", help="these depths, printed only")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    layers = options.layers or ([2, 4] if options.smoke else [12, 24, 48, 96])
    repeats = 1 if options.smoke else options.repeats
    torch.set_num_threads(1)
    model, sample = network(1)
    export(model, sample)
    build(model, sample)  # both once, so that imports are paid for
    print(f"{'layers':>6} {'export s':>9} {'B, D, S s':>9} {'ratio':>6} {'ms/layer':>9}")
    rows = []
    for depth in layers:
        row = measure(depth, repeats)
        rows.append(row)
        times = f"{row.export_s:9.3f} {row.build_s:9.3f} {row.ratio:6.2f} {row.ms_per_layer:9.1f}"
        print(f"{depth:6} {times}", flush=True)
    if options.layers is None and not options.smoke:
        save(rows, repeats, RESULTS)
        write_part("speed", text_of(*load(RESULTS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
