"""What is measured at a point; every function runs in a process of its own (see `worker`)."""

from __future__ import annotations

import contextlib
import copy
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from harness import meter
from harness.meter import RandomState
from harness.networks import NETWORKS, Case, case_of
from harness.worker import Outcome
from measures.strategies import BUDGETED, EXACT, Applied, apply
from rkgb.torch_api import FlopCounter
from rockmate.planning import parse_budget

PEAK_OF_CHECKPOINT = "peak of checkpoint"  # a budget: what a checkpoint round every block takes
SMALLEST = "smallest"  # a budget: the least that the strategy can do with
TRACE_POINTS = 600  # of a memory curve; a picture shows no more
Row = dict[str, Any]
Point = Mapping[str, Any]
Timed = Callable[[Callable[[], object], torch.device], float]


def on_device(case: Case, device: torch.device) -> Case:
    """Return the case with network and sample on a device."""
    sample = tuple(x.to(device) for x in case.sample)
    return Case(case.model.to(device).train(), sample, case.blocks, case.stages)


class Twins:
    """A plain network and the copy that a strategy is applied to, with equal steps of both."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.device = device
        self.case = on_device(case, device)
        self.plain = self.case.model
        self.ours = copy.deepcopy(self.plain)
        for model in (self.plain, self.ours):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)

    def plain_step(self) -> None:
        """Forward and backward of the plain network; gradients are added to what is there."""
        self.plain(*self.case.sample).backward()

    def difference(
        self, step: Callable[[], None], plain_flops: FlopCounter, our_flops: FlopCounter | None
    ) -> str:
        """Take one step of each from equal states; name the first bit that differs, or ""."""
        self.ours.load_state_dict(self.plain.state_dict())
        for model in (self.plain, self.ours):
            model.zero_grad(set_to_none=False)
        state = RandomState.now()
        with plain_flops:
            self.plain_step()
        state.restore()
        with our_flops or contextlib.nullcontext():
            step()
        return meter.first_difference(self.plain, self.ours) or ""


def prepared(point: Point, place: torch.device) -> tuple[Twins, Applied, Row]:
    """Return the two networks, the strategy applied to ours, and a row with the plain peak."""
    case = case_of(point["network"], point["size"], point["batch"], point["seed"])
    twins = Twins(case, place)
    twins.plain_step()
    plain_peak = meter.trace_memory(twins.plain_step, place).peak_bytes
    row: Row = {"plain_peak_bytes": plain_peak}
    budget = 0
    if point["strategy"] in BUDGETED:
        measured = {PEAK_OF_CHECKPOINT: checkpoint_peak, SMALLEST: smallest_budget}
        find = measured.get(point["budget"])
        budget = find(point, twins) if find else budget_of(point["budget"], plain_peak)
    return twins, applied_or_end(point, twins, budget, row), row


def step(point: Point, device: str, warmup: int, repeats: int) -> Row:
    """Peak, time, FLOPs and gradients of one strategy, beside plain PyTorch in turn."""
    twins, applied, row = prepared(point, torch.device(device))

    def our_step() -> None:
        applied.forward().backward()

    return row | compare(twins, our_step, applied, point["strategy"], warmup, repeats)


def offloaded(point: Point, device: str, warmup: int, repeats: int) -> Row:
    """The same of a strategy that moves what it saves: with waits, and with the process's size."""
    twins, applied, row = prepared(point, torch.device(device))

    def our_step() -> None:
        applied.forward().backward()

    for _ in range(2):  # Rockmate's first steps also run a forward to look at what Python decides
        our_step()
    row |= compare(twins, our_step, applied, point["strategy"], warmup, repeats, meter.wall_ms)
    row["plain_resident_bytes"] = meter.resident_bytes(twins.plain_step)
    return row | {"resident_bytes": meter.resident_bytes(our_step)}


def applied_or_end(point: Point, twins: Twins, budget: int, row: Row) -> Applied:
    """Apply the point's strategy; what is known so far goes with a refusal."""
    try:
        return apply(point["strategy"], point["budget"], twins.case, twins.ours, budget)
    except Outcome as outcome:
        outcome.found = row | outcome.found
        raise


def compare(
    twins: Twins,
    our_step: Callable[[], None],
    applied: Applied,
    strategy: str,
    warmup: int,
    repeats: int,
    timed: Timed = meter.timed_ms,
) -> Row:
    """Measure both steps; end the point as failed where a promise is broken."""
    place = twins.device
    row: Row = {"plan_seconds": applied.plan_seconds, **applied.facts}
    plain_flops = FlopCounter()
    # a compiled module that meets a dispatch mode runs uncompiled, then and ever after
    our_flops = FlopCounter() if applied.flops is None else None
    row["difference"] = twins.difference(our_step, plain_flops, our_flops)
    if strategy in EXACT and row["difference"] and place.type == "cpu":
        raise Outcome("failed", f"{row['difference']} is not that of plain PyTorch", **row)
    row["peak_bytes"] = meter.trace_memory(our_step, place).peak_bytes
    budget = row.get("budget_bytes")
    if budget is not None and row["peak_bytes"] > budget:
        text = f"peak of {row['peak_bytes']} bytes with a budget of {budget}"
        raise Outcome("failed", text, **row)
    row["flops"] = our_flops.total if our_flops is not None else applied.flops()
    row["flops_ratio"] = row["flops"] / plain_flops.total if plain_flops.total else None
    return row | paired_times(twins.plain_step, our_step, place, warmup, repeats, timed)


def paired_times(
    plain_step: Callable[[], object],
    our_step: Callable[[], object],
    device: torch.device,
    warmup: int,
    repeats: int,
    timed: Timed = meter.timed_ms,
) -> Row:
    """Time both in turn, so that both meet the same noise; medians, and quartiles of the ratio."""
    pairs = []
    for number in range(warmup + repeats):
        order = (plain_step, our_step) if number % 2 else (our_step, plain_step)
        took = {run: timed(run, device) for run in order}
        pairs.append((took[our_step], took[plain_step]))
    counted = pairs[warmup:]
    ratios = [ours / plain for ours, plain in counted]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "step_ms": statistics.median(ours for ours, _ in counted),
        "plain_step_ms": statistics.median(plain for _, plain in counted),
        "time_ratio": middle,
        "time_ratio_low": low,
        "time_ratio_high": high,
    }


def checkpoint_peak(point: Point, twins: Twins) -> int:
    """Return the measured peak of a step with a checkpoint around every block."""
    model = copy.deepcopy(twins.plain)
    forward = apply("checkpoint", "every block", twins.case, model, 0).forward
    forward().backward()
    return meter.trace_memory(lambda: forward().backward(), twins.device).peak_bytes


def smallest_budget(point: Point, twins: Twins) -> int:
    """Return the least that the strategy says it needs when it is given one byte."""
    try:
        apply(point["strategy"], "1", twins.case, copy.deepcopy(twins.plain), 1)
    except Outcome as outcome:
        if "minimum_bytes" in outcome.found:
            return int(outcome.found["minimum_bytes"])
        raise
    raise Outcome("failed", "a budget of one byte was accepted")


def budget_of(text: str, plain_peak_bytes: int) -> int:
    """Return the bytes of a budget: "50%" of the plain peak, "2GiB", or bytes; "" is the peak."""
    if not text:
        return plain_peak_bytes
    size, fraction = parse_budget(text.split()[0])
    return size if size is not None else int(plain_peak_bytes * (fraction or 0))


# ------------------------------------------------------------------ memory over time


def timeline(point: Point, device: str, warmup: int, repeats: int) -> Row:
    """The memory curve of one step: the fastest of several, thinned to what a picture shows."""
    place = torch.device(device)
    _, applied, row = prepared(point, place)

    def our_step() -> None:
        applied.forward().backward()

    for _ in range(warmup):
        our_step()
    traces = [meter.trace_memory(our_step, place) for _ in range(repeats)]
    best = min(traces, key=lambda trace: trace.times_ms[-1] if trace.times_ms else 0.0)
    times, held = thinned(best.times_ms, best.held_bytes, TRACE_POINTS)
    return row | {
        **applied.facts,
        "peak_bytes": best.peak_bytes,
        "curve_ms": " ".join(f"{t:.2f}" for t in times),
        "curve_kib": " ".join(f"{h / 1024:.0f}" for h in held),
    }


def thinned(
    times: tuple[float, ...], held: tuple[int, ...], count: int
) -> tuple[list[float], list[int]]:
    """Return at most `count` points of a curve, the highest of every stretch among them."""
    stretch = max(1, -(-2 * len(times) // count))
    kept: list[int] = []
    for start in range(0, len(times), stretch):
        part = range(start, min(start + stretch, len(times)))
        high, low = max(part, key=held.__getitem__), min(part, key=held.__getitem__)
        kept += sorted({high, low})
    return [times[i] for i in kept], [held[i] for i in kept]


# ------------------------------------------------------------------ throughput


def throughput(point: Point, device: str, warmup: int, repeats: int) -> Row:
    """Samples per second at a batch, over those of plain PyTorch at the batch that fills memory.

    The point's budget is "peak@8": the plain peak at batch 8. Both networks are in one process and
    take their steps in turn.
    """
    place = torch.device(device)
    base = int(point["budget"].partition("@")[2])
    network = NETWORKS[point["network"]]
    reference = on_device(network.case(point["size"], base, point["seed"]), place)
    for parameter in reference.model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def reference_step() -> None:
        reference.model(*reference.sample).backward()

    reference_step()
    memory = meter.trace_memory(reference_step, place).peak_bytes
    case = on_device(network.case(point["size"], point["batch"], point["seed"]), place)
    for parameter in case.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    strategy, _, setting = point["strategy"].partition(" ")
    applied = apply(strategy, setting, case, case.model, memory)

    def our_step() -> None:
        applied.forward().backward()

    our_step()
    row: Row = {
        "plan_seconds": applied.plan_seconds,
        **applied.facts,
        "budget_bytes": memory,
        "plain_peak_bytes": memory,
        "peak_bytes": meter.trace_memory(our_step, place).peak_bytes,
    }
    if row["peak_bytes"] > memory:
        text = f"needs {row['peak_bytes']} bytes at batch {point['batch']}, there are {memory}"
        raise Outcome("over budget", text, **row)
    row |= paired_times(reference_step, our_step, place, warmup, repeats)
    row["throughput_ratio"] = point["batch"] / base / row["time_ratio"]
    row["samples_per_second"] = 1e3 * point["batch"] / row["step_ms"]
    return row
