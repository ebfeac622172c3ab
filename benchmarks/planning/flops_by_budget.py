"""FLOPs against memory on the network of the peers' table, ours beside the best peer.

An 8-layer GPT (width 256, 4 heads, 8 x 256 tokens, vocabulary 1024, no dropout) with its loss
inside, planned with `cost="flops"` and executed; the peak is what the allocator counted during the
self-test. The peers' figures are facts that were measured once, with torch 2.13 on a CPU, for this
very network: the fewest FLOPs of any peer (activation checkpointing in all forms, selective
checkpointing, torch.compile with a memory budget) whose real peak is within the budget.

    $ python -m planning.flops_by_budget [--effort best] [--budgets 57 100]
    $ python -m planning.flops_by_budget --cost measured --busy

The second plans by measured times while every core is kept busy by other processes: are plans worse
than those that a quiet machine leads to?
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from harness import meter
from harness.meter import MIB
from models.peers_gpt import GPT
from rkgb.torch_api import EXTRA_FLOP_FORMULAS
from rockmate import InfeasibleBudgetError, Rockmate

# budget in MiB -> FLOPs over eager's of the best peer within it
PEERS = {
    40: None, 45: None, 51: 1.6966, 57: 1.6966, 61: 1.6966, 71: 1.2022, 85: 1.1798, 100: 1.1404,
    114: 1.1404, 128: 1.1011, 142: 1.0899, 156: 1.0618, 171: 1.0449, 184: 1.0000, 199: 1.0000,
}  # fmt: skip


def step_flops(model: nn.Module, sample: tuple[Tensor, Tensor]) -> int:
    """Count the FLOPs of one forward and backward, as they are executed."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False, custom_mapping=EXTRA_FLOP_FORMULAS) as counter:
        model(*sample).backward()
    return int(counter.get_total_flops())


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core busy with another program."""
    spin = "while True: sum(i * i for i in range(10000))"
    count = os.cpu_count() or 1
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> int:
    """Print the table, write it as CSV, and fail when a measured peak is above its budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--effort", default="fast")
    parser.add_argument("--cost", default="flops", choices=("flops", "measured"))
    parser.add_argument("--busy", action="store_true", help="while other processes use every core")
    parser.add_argument("--budgets", type=int, nargs="*", default=list(PEERS))
    parser.add_argument("--out", type=Path, default=meter.RESULTS / "latest/flops_by_budget.csv")
    options = parser.parse_args()
    with busy_cores() if options.busy else contextlib.nullcontext():
        return measure(options)


def measure(options: argparse.Namespace) -> int:
    """Plan and run every budget; return what the process is to end with."""
    torch.manual_seed(0)
    model = GPT().train()
    ids = torch.randint(0, 1024, (8, 256))
    sample = (ids, ids)
    eager = step_flops(model, sample)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    environment = meter.environment(torch.device("cpu"))
    shown = 9  # columns
    print("budget MiB | measured | predicted | FLOPs | best peer | gap % | seconds | rerun | by")
    for budget in options.budgets:
        try:
            rk = Rockmate(
                *(model, sample, budget * MIB),
                cost=options.cost,
                effort=options.effort,
                cache=False,
            )
        except InfeasibleBudgetError as error:
            print(f"{budget:10} | infeasible; smallest {error.minimum_bytes / MIB:.2f} MiB")
            continue
        measured = rk.measured_peak_bytes or 0
        ours = step_flops(rk, sample) / eager
        peer = PEERS.get(budget)
        runs = Counter(step.node for step in rk.plan.steps if step.kind == "F")
        rows.append(
            {
                "budget_mib": budget,
                "measured_mib": f"{measured / MIB:.2f}",
                "predicted_mib": f"{rk.plan.peak_bytes / MIB:.2f}",
                "flops_ratio": f"{ours:.4f}",
                "peer_flops_ratio": "" if peer is None else f"{peer:.4f}",
                "gap_percent": f"{100 * (rk.plan.gap or 0):.2f}",
                "plan_seconds": f"{rk.plan.plan_seconds:.1f}",
                "recomputed_nodes": sum(count > 1 for count in runs.values()),
                "planner": rk.plan.planner,
                "effort": options.effort,
                "cost": options.cost + (", busy" if options.busy else ""),
                **environment,
            }
        )
        print(" | ".join(str(value) for value in list(rows[-1].values())[:shown]))
        sys.stdout.flush()
        if measured > budget * MIB:
            print("measured peak above the budget", file=sys.stderr)
            return 1
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
