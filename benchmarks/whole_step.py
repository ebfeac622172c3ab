"""What whole steps take of the memory that they were given: networks, optimizers and loops.

Each network is planned with a tenth more memory than the least that does with AdamW of all
parameters at once, then trained for some steps: forward with loss, backward, optimizer,
`zero_grad`. Counted is everything that is held: parameters, buffers, gradients, the optimizer's
state and its temporaries, inputs, activations. Other optimizers get less memory by as much as they
keep less, so one search serves.

    $ python benchmarks/whole_step.py                     # rows in results/whole_step.csv
    $ python benchmarks/whole_step.py --only unet --size smoke

An average of the weights is given beside the optimizer, with memory for it. Exits with an error
where a step has taken more than its memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from harness import meter
from harness.networks import NETWORKS
from rockmate import InfeasibleBudgetError, Rockmate
from rockmate.whole_step import optimizer_bytes

CPU = torch.device("cpu")
NAMES = (
    *("unet", "fno", "mlp-mixer", "resnet50", "regnet-x-3.2"),
    *("regnet-y-1.6", "gpt2-small", "gpt2-medium", "transformer", "gpt"),
)
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: Mapping[str, Make] = {
    "AdamW": partial(torch.optim.AdamW, foreach=False),
    "AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=False),
    "SGD, foreach": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=True),
}
LOOPS = ("one batch", "3 micro-batches", "zeros in gradients", "average of weights")
_STEPS = (2, 1, 2, 1)  # of each loop: the first finds no state, the third no gradients at first
_MOST = "AdamW, foreach"
_SHARE = 1.1  # of the least memory


def peak_bytes(
    rk: nn.Module,
    stepper: torch.optim.Optimizer,
    sample: Sequence[Tensor],
    loop: str,
    average: AveragedModel | None,
) -> int:
    """Return the most that is held in some whole steps, all together."""

    def step() -> None:
        for _ in range(3 if loop == LOOPS[1] else 1):
            rk(*sample).backward()
        stepper.step()
        if average is not None:
            average.update_parameters(rk)
        stepper.zero_grad(set_to_none=loop != LOOPS[2])

    found = []
    for _ in range(_STEPS[LOOPS.index(loop)]):
        held = meter.held_bytes(rk, stepper, sample) + kept_bytes(average)
        found.append(held + meter.trace_memory(step, CPU).peak_bytes)
    return max(found)


def kept_bytes(average: AveragedModel | None) -> int:
    """Return what an average of weights takes."""
    if average is None:
        return 0
    return sum(tensor.nbytes for tensor in (*average.parameters(), *average.buffers()))


def state_bytes(optimizer: str, model: nn.Module) -> int:
    """Return what an optimizer will keep of a network."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return optimizer_bytes(OPTIMIZERS[optimizer](trained), trained, CPU).state_bytes


def memory_of(name: str, size: str) -> int:
    """Return a tenth more memory than the least for a network and the largest optimizer."""
    case = NETWORKS[name].case(size)
    stepper = OPTIMIZERS[_MOST](case.model.parameters())
    how: dict[str, Any] = {"optimizer": stepper, "cost": "flops", "progress": False}
    try:
        Rockmate(case.model, case.sample, memory=1000, **how)
    except InfeasibleBudgetError as error:
        return int(_SHARE * error.minimum_bytes)
    raise AssertionError("1000 bytes are enough for nothing")


def rows_of(
    name: str, size: str, optimizer: str, memory_bytes: int, cache: str
) -> list[dict[str, object]]:
    """Plan a network for an optimizer, and return a row for each loop.

    The memory is that of the optimizer that takes most.
    """
    case = NETWORKS[name].case(size)
    memory_bytes += state_bytes(optimizer, case.model) - state_bytes(_MOST, case.model)
    stepper = OPTIMIZERS[optimizer](case.model.parameters())
    how: dict[str, Any] = {"cost": "flops", "progress": False, "cache": cache}
    rk = Rockmate(case.model, case.sample, memory=memory_bytes, optimizer=stepper, **how)
    found: list[dict[str, object]] = []
    for loop in LOOPS:
        average = None
        if loop == LOOPS[3]:
            case.model.zero_grad()
            average = AveragedModel(case.model)
            memory_bytes += kept_bytes(average)
            both = [stepper, average]
            rk = Rockmate(case.model, case.sample, memory=memory_bytes, optimizer=both, **how)
        measured = peak_bytes(rk, stepper, case.sample, loop, average)
        own = {"loop": loop, "measured_bytes": measured}
        row = {"network": name, "size": size, "optimizer": optimizer, **planned_for(rk), **own}
        found.append({**row, "used_percent": f"{100 * measured / memory_bytes:.2f}"})
    return found


def planned_for(rk: Rockmate) -> dict[str, object]:
    """Return what was asked and planned, by part."""
    memory = rk.memory
    parts = {f"{part.name.partition(',')[0]}": part.size_bytes for part in memory.parts}
    state = next((size for name, size in parts.items() if name.startswith("state of")), 0)
    return {
        "asked_bytes": memory.asked_bytes,
        "predicted_bytes": memory.resident_bytes + max(rk.plan.peak_bytes, memory.stepping_bytes),
        "parameters_bytes": parts["parameters"],
        "buffers_bytes": parts.get("buffers", 0),
        "gradients_bytes": sum(p.nbytes for p in rk.parameters() if p.requires_grad),
        "state_bytes": state,
        "copies_bytes": parts.get("copies of weights", 0),
        "inputs_bytes": parts["inputs"],
        "budget_bytes": rk.budget_bytes,
        "peak_bytes": rk.plan.peak_bytes,
        "stepping_bytes": memory.stepping_bytes,
        "overhead_percent": f"{100 * rk.plan.overhead:.2f}",
    }


def main(words: Sequence[str] | None = None) -> int:
    """Measure, write the rows, and say whether every step kept its promise."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="networks whose name has this in it")
    parser.add_argument("--size", default="cpu", choices=("smoke", "cpu", "paper"))
    parser.add_argument("--out", type=Path, default=meter.RESULTS / "whole_step.csv")
    chosen = parser.parse_args(words)
    rows: list[dict[str, object]] = []
    here = meter.environment(CPU)
    if not any(chosen.only in name for name in NAMES):
        parser.error(f"no network has {chosen.only!r} in its name; there are {', '.join(NAMES)}")
    for name in (name for name in NAMES if chosen.only in name):
        memory_bytes = memory_of(name, chosen.size)
        with tempfile.TemporaryDirectory() as cache:
            for optimizer in OPTIMIZERS:
                for row in rows_of(name, chosen.size, optimizer, memory_bytes, cache):
                    rows.append({**row, **here})
                    used = f"{row['used_percent']:>8} %"
                    print(f"{name:<14}{optimizer:<16}{row['loop']:<20}{used}", flush=True)
                meter.write_csv(chosen.out, rows)
    above = [row for row in rows if int(str(row["measured_bytes"])) > int(str(row["asked_bytes"]))]
    print(f"{len(rows)} loops, {len(above)} above their memory: {chosen.out}")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
