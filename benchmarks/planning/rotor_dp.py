"""Speed and memory of rotor's dynamic program, beside a textbook implementation in the same run.

    python -m planning.rotor_dp [--smoke] [--seed N] [--out FILE]

One core, process CPU time, the best of several runs. An update is one candidate compared with one
table entry. For the textbook, and for the column `nominal`, their number is slots * n^3 / 6; rotor
does fewer, because it skips what is infeasible, what is constant, and splits that cannot be the
fastest (`updates` are those done).

The textbook is the same recurrence in C++ over a table of doubles and back pointers indexed
[m][a][b], compiled here; its makespan is compared with rotor's. It is run in two orders: run by run
of stages, with all m in turn, as the recurrence is written; and with m outermost, which is kinder
to the caches. Where no compiler is found its rows say so.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.meter import RESULTS, environment, write_csv
from rotor import Chain, Option, Stage
from rotor.solver.table import ChainTable, chain_tuples

SLOTS = 500
BUDGET_SHARE = 0.3  # of what keeping everything takes
TEXTBOOK = r"""
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

// One option per stage. All sizes in slots. table: [m][a][b].
struct Stages {
    int64_t n, slots;
    const int64_t *output, *grad, *forward_peak;
    const double* forward_time;
    const int64_t *saved, *fwd_overhead, *bwd_overhead;
    const double* time;
};

struct Table {
    explicit Table(const Stages& stages)
        : s(stages),
          opt((s.slots + 1) * s.n * s.n, std::numeric_limits<double>::infinity()),
          choice((s.slots + 1) * s.n * s.n, -1) {}

    int64_t at(int64_t m, int64_t a, int64_t b) const { return (m * s.n + a) * s.n + b; }

    void compute(int64_t m, int64_t a, int64_t b) {
        const int64_t held = b < s.n - 1 ? s.grad[b] : 0;
        double best = std::numeric_limits<double>::infinity();
        int32_t pick = -1;
        const int64_t need = std::max(s.saved[a] + s.fwd_overhead[a] + held,
                                      s.saved[a] + s.grad[a] + s.bwd_overhead[a]);
        if (m >= need) {
            const double rest = a < b ? opt[at(m - s.saved[a], a + 1, b)] : 0.0;
            if (s.time[a] + rest < best) { best = s.time[a] + rest; pick = 0; }
        }
        int64_t peak = 0;
        double ahead = 0;
        for (int64_t j = a + 1; j <= b; ++j) {
            const int64_t k = j - 1;
            peak = std::max(peak, (k > a ? s.output[k - 1] : 0) + s.forward_peak[k]);
            ahead += s.forward_time[k];
            if (m < peak + held) break;
            if (m < s.output[k]) continue;
            const double total = ahead + opt[at(m - s.output[k], j, b)] + opt[at(m, a, k)];
            if (total < best) { best = total; pick = static_cast<int32_t>(j); }
        }
        opt[at(m, a, b)] = best;
        choice[at(m, a, b)] = pick;
    }

    Stages s;
    std::vector<double> opt;
    std::vector<int32_t> choice;
};

extern "C" double textbook(bool memory_outermost, Stages s) {
    Table table(s);
    if (memory_outermost) {
        for (int64_t m = 0; m <= s.slots; ++m)
            for (int64_t length = 0; length < s.n; ++length)
                for (int64_t a = 0; a + length < s.n; ++a) table.compute(m, a, a + length);
    } else {
        for (int64_t length = 0; length < s.n; ++length)
            for (int64_t a = 0; a + length < s.n; ++a)
                for (int64_t m = 0; m <= s.slots; ++m) table.compute(m, a, a + length);
    }
    return table.opt[table.at(s.slots, 0, s.n - 1)];
}
"""


def make_chain(stages: int, options: int, seed: int, *, identical: bool = False) -> Chain:
    """Return stages of realistic proportions: backward twice the forward, some room inside."""
    generator = random.Random(seed)
    made: list[Stage] = []
    for index in range(stages):
        if identical:
            generator = random.Random(seed)
        output = generator.randint(1000, 4000)
        forward = generator.uniform(1, 5)
        ways = tuple(
            Option(
                saved_bytes=int(output * (1 + 3 * (options - k) / options)),
                fwd_time_ms=forward,
                bwd_time_ms=2 * forward + 0.1 * k * forward,
                fwd_overhead_bytes=generator.randint(0, 500),
                bwd_overhead_bytes=generator.randint(500, 4000),
            )
            for k in range(options)
        )
        made.append(
            Stage(
                name=str(index),
                options=ways,
                output_bytes=output,
                output_grad_bytes=output,
                forward_time_ms=forward,
                forward_peak_bytes=output + generator.randint(0, 500),
            )
        )
    return Chain(tuple(made))


def in_slots(chain: Chain, slots: int) -> Chain:
    """Return the chain with all sizes rounded up to slots, so that both tables see the same."""
    total = sum(stage.options[0].saved_bytes for stage in chain.stages)
    unit = max(1, int(total * BUDGET_SHARE / slots))

    def up(size: int) -> int:
        return -(-size // unit)

    return Chain(
        tuple(
            Stage(
                name=s.name,
                options=tuple(
                    Option(
                        up(o.saved_bytes),
                        o.fwd_time_ms,
                        o.bwd_time_ms,
                        up(o.fwd_overhead_bytes),
                        up(o.bwd_overhead_bytes),
                    )
                    for o in s.options
                ),
                output_bytes=up(s.output_bytes),
                output_grad_bytes=up(s.output_grad_bytes),
                forward_time_ms=s.forward_time_ms,
                forward_peak_bytes=up(s.forward_peak_bytes),
            )
            for s in chain.stages
        )
    )


def compile_textbook(folder: Path) -> ctypes.CDLL | None:
    """Return the compiled textbook, or None where there is no compiler."""
    source, library = folder / "textbook.cpp", folder / "textbook.so"
    source.write_text(TEXTBOOK, encoding="utf-8")
    command = ["g++", "-O3", "-march=native", "-shared", "-fPIC", "-std=c++17", "-o"]
    try:
        subprocess.run([*command, str(library), str(source)], check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return ctypes.CDLL(str(library))


class _Stages(ctypes.Structure):
    _fields_ = (
        ("n", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("output", ctypes.POINTER(ctypes.c_int64)),
        ("grad", ctypes.POINTER(ctypes.c_int64)),
        ("forward_peak", ctypes.POINTER(ctypes.c_int64)),
        ("forward_time", ctypes.POINTER(ctypes.c_double)),
        ("saved", ctypes.POINTER(ctypes.c_int64)),
        ("fwd_overhead", ctypes.POINTER(ctypes.c_int64)),
        ("bwd_overhead", ctypes.POINTER(ctypes.c_int64)),
        ("time", ctypes.POINTER(ctypes.c_double)),
    )


def run_textbook(
    library: ctypes.CDLL, chain: Chain, slots: int, *, memory_outermost: bool
) -> tuple[float, float]:
    """Return seconds of CPU time and the makespan."""

    def integers(values: list[int]) -> ctypes.Array[ctypes.c_int64]:
        return (ctypes.c_int64 * len(values))(*values)

    def reals(values: list[float]) -> ctypes.Array[ctypes.c_double]:
        return (ctypes.c_double * len(values))(*values)

    options = [stage.options[0] for stage in chain.stages]
    stages = _Stages(
        len(chain),
        slots,
        integers([s.output_bytes for s in chain.stages]),
        integers([s.output_grad_bytes for s in chain.stages]),
        integers([s.forward_peak_bytes for s in chain.stages]),
        reals([s.forward_time_ms for s in chain.stages]),
        integers([o.saved_bytes for o in options]),
        integers([o.fwd_overhead_bytes for o in options]),
        integers([o.bwd_overhead_bytes for o in options]),
        reals([o.fwd_time_ms + o.bwd_time_ms for o in options]),
    )
    library.textbook.restype = ctypes.c_double
    library.textbook.argtypes = [ctypes.c_bool, _Stages]
    start = time.process_time()
    makespan = library.textbook(memory_outermost, stages)
    return time.process_time() - start, makespan


@dataclass(frozen=True)
class Run:
    """The fastest of several runs, the solver's own preparation included."""

    cpu_seconds: float
    makespan_ms: float
    table: ChainTable


def run_rotor(chains: Sequence[Chain], slots: int, repeats: int) -> list[Run]:
    """Return a run for each chain. They take turns, so that they see the same machine."""
    best: dict[int, float] = {}
    tables: dict[int, ChainTable] = {}
    tuples = [chain_tuples(chain) for chain in chains]
    for _ in range(repeats):
        for index, stages in enumerate(tuples):
            start = time.process_time()
            table = ChainTable(stages, 1, slots)
            table.fill()
            seconds = time.process_time() - start
            best[index] = min(best.get(index, seconds), seconds)
            tables[index] = table
    return [Run(best[i], table.makespan(slots), table) for i, table in tables.items()]


def measure(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Return one row per chain and implementation."""
    rows: list[dict[str, object]] = []
    lengths = (20, 40) if arguments.smoke else (48, 100, 340)
    with tempfile.TemporaryDirectory() as folder:
        library = compile_textbook(Path(folder))
        for stages in lengths:
            one = in_slots(make_chain(stages, 1, arguments.seed), SLOTS)
            ten = in_slots(make_chain(stages, 10, arguments.seed), SLOTS)
            repeats = max(5, 3000 // stages)
            nominal = SLOTS * stages**3 / 6
            run, wide = run_rotor([one, ten], SLOTS, repeats)
            seconds = run.cpu_seconds
            rows.append(
                {
                    **row_of("rotor", stages, 1, run),
                    "nominal_updates_per_s": f"{nominal / seconds:.3g}",
                    "makespan_ms": round(run.makespan_ms, 3),
                }
            )
            beside = {"against_one_option": round(wide.cpu_seconds / seconds, 3)}
            rows.append(row_of("rotor", stages, 10, wide) | beside)
            for outermost in (False, True):
                rows.append(textbook_row(library, one, run, outermost, arguments.full))
    stages = 200 if arguments.smoke else 1000
    chain = in_slots(make_chain(stages, 1, arguments.seed, identical=True), SLOTS)
    (run,) = run_rotor([chain], SLOTS, 5)
    found = {"makespan_ms": round(run.makespan_ms, 3), "cells": run.table.cell_count}
    rows.append(row_of("rotor, identical stages", stages, 1, run) | found)
    return rows


def row_of(implementation: str, stages: int, options: int, run: Run) -> dict[str, object]:
    """Return what every run of rotor has in its row."""
    return {
        "implementation": implementation,
        "stages": stages,
        "options": options,
        "slots": SLOTS,
        "cpu_ms": round(1e3 * run.cpu_seconds, 2),
        "updates_per_s": f"{run.table.updates / run.cpu_seconds:.3g}",
        "table_bytes": run.table.table_bytes,
        "bound_bytes": 2 * stages**2 * SLOTS,
    }


def textbook_row(
    library: ctypes.CDLL | None, chain: Chain, rotor_run: Run, memory_outermost: bool, full: bool
) -> dict[str, object]:
    """Return the textbook's row for the chain that rotor has just solved."""
    stages = len(chain)
    order = "m outermost" if memory_outermost else "as written"
    row: dict[str, object] = {
        "implementation": f"textbook [m][a][b], {order}",
        "stages": stages,
        "options": 1,
    }
    if library is None:
        return {**row, "note": "not run: no g++"}
    # Its rate hardly depends on the number of slots, and at full size it takes a minute.
    slots = SLOTS // 5 if stages > 200 and not full else SLOTS
    seconds, makespan = run_textbook(library, chain, slots, memory_outermost=memory_outermost)
    rate = slots * stages**3 / 6 / seconds
    ours = SLOTS * stages**3 / 6 / rotor_run.cpu_seconds
    if slots == SLOTS and abs(makespan - rotor_run.makespan_ms) > 1e-4 * makespan:
        raise AssertionError(f"makespans differ: {makespan} and {rotor_run.makespan_ms}")
    return {
        **row,
        "slots": slots,
        "cpu_ms": round(1e3 * seconds, 2),
        "nominal_updates_per_s": f"{rate:.3g}",
        "table_bytes": 12 * (slots + 1) * stages**2,
        "makespan_ms": round(makespan, 3) if slots == SLOTS else "",
        "rotor_is_faster_by": round(ours / rate, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small chains, a few seconds")
    parser.add_argument("--full", action="store_true", help="the textbook at full size too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "rotor_dp.csv")
    arguments = parser.parse_args()
    stamp = environment(torch.device("cpu")) | {"threads": "1", "seed": str(arguments.seed)}
    rows = measure(arguments)
    write_csv(arguments.out, [{**row, **stamp} for row in rows])
    for row in rows:
        cells = (f"{key}={value}" for key, value in row.items() if value != "")
        sys.stdout.write("  ".join(cells) + "\n")


if __name__ == "__main__":
    main()
