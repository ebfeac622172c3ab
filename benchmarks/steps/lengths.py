"""What batches of many sizes cost: every step beside the same step of plain PyTorch.

A network and its twin take the same steps: one planned within a budget, one plain; the bits of loss
and gradients are compared at every step. Times are CPU time of one thread, so that what else the
machine does is not in them. At the first step of each size one more planned step runs under the
allocator's eye. Rows: one a step, in lengths.csv.
"""

from __future__ import annotations

import argparse
import copy
import csv
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from harness import meter
from rkgb.engine import trace_memory
from rockmate import Rockmate
from steps.loops import LOOPS, Batch, Loop

_MOST_SIZES = 100  # plans that are kept
_RATE = 1e-3
_COLUMNS = (
    *("network", "step", "shape", "how", "planned_s", "plain_s", "equal", "budget_bytes"),
    *(
        "peak_bytes",
        "again_percent",
        "size",
        "status",
        "commit",
        "device",
        "threads",
        "torch",
        "python",
    ),
)
Row = dict[str, object]


def rows_of(name: str, loop: Loop) -> Iterator[Row]:
    """Train, and yield a row for the planning of the sample and one for each step."""
    model, twin = loop.model, copy.deepcopy(loop.model)
    began = time.process_time()
    # No plans of earlier runs: it is measured what planning takes.
    rk = Rockmate(model, dict(loop.sample), loop.budget, max_plans=_MOST_SIZES, cache=False)
    budget = rk.budget_bytes
    row: Row = {"network": name, "step": 0, "shape": loop.shape(loop.sample), "how": "planned"}
    yield row | {"planned_s": time.process_time() - began, "budget_bytes": budget}
    seen: set[str] = set()
    for number, batch in enumerate(loop.batches, 1):
        plain_s, expected = _step(twin, batch, loop.loss, number)
        known = len(rk.plans)
        planned_s, found = _step(rk, batch, loop.loss, number)
        row = {"network": name, "step": number, "shape": loop.shape(batch), "budget_bytes": budget}
        row["how"] = rk.plans[-1].how if len(rk.plans) > known else ""
        row |= {"planned_s": planned_s, "plain_s": plain_s}
        row["equal"] = torch.equal(found, expected) and _equal_gradients(rk, twin)
        _descend(rk)
        _descend(twin)
        if loop.shape(batch) not in seen:
            seen.add(loop.shape(batch))
            row["peak_bytes"] = _peak_bytes(rk, batch, loop.loss)
            row["again_percent"] = 100 * rk.plans[-1].overhead
        yield row


def _step(
    model: nn.Module, batch: Batch, loss: Callable[[nn.Module, Batch], Tensor], seed: int
) -> tuple[float, Tensor]:
    """Take one step and return its seconds and its loss."""
    torch.manual_seed(seed)
    began = time.process_time()
    value = loss(model, batch)
    value.backward()  # type: ignore[no-untyped-call]
    return time.process_time() - began, value.detach()


def _peak_bytes(model: nn.Module, batch: Batch, loss: Callable[[nn.Module, Batch], Tensor]) -> int:
    """Return the peak of one more step, of which nothing remains."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def step(_span: object) -> None:
        loss(model, batch).backward()  # type: ignore[no-untyped-call]

    peak = trace_memory(step, torch.device("cpu")).peak_bytes
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
    return peak


def _equal_gradients(model: nn.Module, twin: nn.Module) -> bool:
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        if ours.grad is None or theirs.grad is None:
            if ours.grad is not theirs.grad:
                return False
        elif not torch.equal(ours.grad, theirs.grad):
            return False
    return True


def _descend(model: nn.Module) -> None:
    """Take a step of plain descent; the memory of gradients stays, as the budget counts it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=_RATE)
                parameter.grad.zero_()


def summary(rows: Sequence[Row]) -> str:
    """Say in a line what the rows of one network show, and raise nothing."""
    first, *steps = rows
    plain = sum(_number(row["plain_s"]) for row in steps)
    ours = sum(_number(row["planned_s"]) for row in steps)
    known = [row for row in steps if not row.get("peak_bytes")]  # not the first of their shape
    usual = sum(_number(r["planned_s"]) for r in known) / sum(_number(r["plain_s"]) for r in known)
    planning = sum(
        max(0.0, _number(row["planned_s"]) - usual * _number(row["plain_s"]))
        for row in steps
        if row["how"]
    )
    longest = max(_number(row["planned_s"]) / _number(row["plain_s"]) for row in steps)
    peak = max(_number(row.get("peak_bytes") or 0) / _number(row["budget_bytes"]) for row in steps)
    shapes = len({row["shape"] for row in steps})
    wrong = sum(str(row["equal"]) != "True" for row in steps)
    return (
        f"{first['network']}: {len(steps)} steps of {shapes} shapes; planning the first took "
        f"{_number(first['planned_s']):.1f} s and all others {100 * planning / ours:.1f} % of the "
        f"run; a step takes {usual:.2f} of plain PyTorch's, the whole run {ours / plain:.2f}, the "
        f"longest step {longest:.1f}; peak {100 * peak:.1f} % of the budget; {wrong} steps with "
        "other bits"
    )


def _number(value: object) -> float:
    return float(str(value))


def main(arguments: Sequence[str]) -> int:
    """Run the loops that were asked for; 1 where a step differs or is above the budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(LOOPS), choices=list(LOOPS))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--out", type=Path, default=meter.RESULTS / "latest/lengths.csv")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    size = "smoke" if options.smoke else "cpu"
    constant = {"size": size, "status": "ok", **meter.environment(torch.device("cpu"))}
    good = True
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=_COLUMNS, lineterminator="\n")
        writer.writeheader()
        for name in options.only:
            build, full, small = LOOPS[name]
            torch.manual_seed(0)
            rows = []
            for row in rows_of(name, build(small if options.smoke else full)):
                rows.append(row)
                writer.writerow(row | constant)
                file.flush()
            print(summary(rows))
            sys.stdout.flush()
            good &= all(
                row["equal"] is True
                and _number(row.get("peak_bytes") or 0) <= _number(row["budget_bytes"])
                for row in rows[1:]
            )
    return 0 if good else 1
