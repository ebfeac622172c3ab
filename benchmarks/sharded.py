"""Per-layer FSDP2 on two processes: peak of each rank and step time, plain, checkpointed, planned.

    $ .venv/bin/python benchmarks/sharded.py            # rows and a picture in benchmarks/results
    $ .venv/bin/python benchmarks/sharded.py --smoke    # tiny, to see that it runs

Every layer is sharded with `fully_shard`. Checkpointing runs every layer again. A plan gets the
peak of the checkpointed step as its budget, and fractions of what keeping everything takes. Times
are of the processor, the least of some steps, so that a busy machine disturbs little.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rockmate
from harness.meter import environment, write_csv
from rkgb.engine import trace_memory

RESULTS = Path(__file__).parent / "results"
WORLD = 2
CPU = torch.device("cpu")
PLANNED = ("planned in the checkpointed peak", "planned 0.4", "planned 0.6", "planned 0.8")
STRATEGIES = ("plain", "checkpoint every layer", *PLANNED)


class Network(nn.Module):
    """Layers of a transformer, and the loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def sharded(model: Any, strategy: str) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    for place, layer in enumerate(model.layers):
        if strategy == "checkpoint every layer":
            model.layers[place] = checkpoint_wrapper(layer)
        fully_shard(model.layers[place])
    return fully_shard(model)


def measure(rank: int, store: str, smoke: bool, out: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD
    )
    width, layers, batch, length, repeats = (16, 3, 2, 16, 1) if smoke else (128, 8, 4, 128, 5)
    torch.manual_seed(0)
    original = Network(width, layers)
    x = torch.randn(batch, length, width)
    rows: list[dict[str, object]] = []
    peaks: dict[str, int] = {}
    grads: list[Tensor] = []
    for strategy in STRATEGIES:
        model = sharded(copy.deepcopy(original), strategy)
        budget: int | float = 0
        if strategy in PLANNED:
            budget = peaks["checkpoint every layer"]
            if strategy != PLANNED[0]:
                budget = float(strategy.split()[1])
            try:
                budget = rockmate.apply_to_blocks(model, x, budget, cost="flops").budget_bytes
            except rockmate.InfeasibleBudgetError as error:
                if rank == 0:
                    rows.append({"strategy": strategy, "note": str(error)})
                continue

        def step(_: object = None, model: nn.Module = model) -> None:
            model(x).backward()

        step()
        found = [p.grad.to_local().clone() for p in model.parameters()]
        grads = grads or found
        peaks[strategy] = min(trace_memory(step, CPU).peak_bytes for _ in range(3))
        times = []
        for _ in range(repeats):
            began = time.process_time()
            step()
            times.append(1e3 * (time.process_time() - began))
        everyone: list[Any] = [None] * WORLD
        same = all(map(torch.equal, found, grads))
        torch.distributed.all_gather_object(everyone, (peaks[strategy], min(times), same))
        row = {
            "strategy": strategy,
            "budget_bytes": budget or "",
            **{f"peak_bytes_rank{i}": peak for i, (peak, _, _) in enumerate(everyone)},
            "step_cpu_ms": round(max(took for _, took, _ in everyone), 2),
            "same_bits": all(bits for _, _, bits in everyone),
            "note": "",
            **environment(CPU),
        }
        rows.append(row)
        if rank == 0:
            print({k: row[k] for k in ("strategy", "peak_bytes_rank0", "step_cpu_ms", "same_bits")})
    if rank == 0:
        write_csv(Path(out) / "sharded.csv", rows)
        draw(rows, Path(out) / "sharded.png")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the peak of a rank beside the time of a step; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    axes = (figure := Figure(figsize=(6, 4))).subplots()
    base = rows[0]["step_cpu_ms"]
    for row in rows:
        if "step_cpu_ms" in row:
            peak = max(row[f"peak_bytes_rank{i}"] for i in range(WORLD)) / 2**20
            axes.plot(peak, row["step_cpu_ms"] / base, "o" if "plan" in row["strategy"] else "s")
            axes.annotate(row["strategy"], (peak, row["step_cpu_ms"] / base), fontsize=8)
    axes.set_xlabel("peak of a rank above what is resident (MiB)")
    axes.set_ylabel("time of a step over plain FSDP2")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    options = parser.parse_args()
    out = options.out / "latest" / "smoke" if options.smoke else options.out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = (f"{folder}/store", options.smoke, str(out))
        torch.multiprocessing.spawn(measure, work, WORLD)


if __name__ == "__main__":
    main()
