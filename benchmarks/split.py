"""Budgets below the largest operation: peak and time in pieces of rows, beside loops by hand.

    $ .venv/bin/python benchmarks/split.py                 # rows in benchmarks/results/split.csv
    $ .venv/bin/python benchmarks/split.py --only head     # one network
    $ .venv/bin/python benchmarks/split.py --smoke         # tiny, to see that it runs

Each way to run a network gets the smallest budget that it can be planned for, and one that was set
as a goal. The rows of loops by hand get their peak as the budget of a plan in pieces. Plain steps
and the others are run in turn; times are medians of ratios within a turn. Rows of networks that are
not run stay. A way that is not installed has a row that says so.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from harness.experiment import read_rows
from harness.meter import environment, same_bits, timed_ms, trace_memory, write_csv
from harness.networks import NETWORKS, llama
from rockmate import InfeasibleBudgetError, Rockmate

RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")
WAYS: tuple[bool | str, ...] = (False, "exact", True)
CHUNKS, LOOKS = 32, 3
WHY_NO_LIGER = "liger-kernel (0.8.5) imports triton, which runs on no CPU"


class Head(nn.Module):
    """Hidden states to the loss over a vocabulary, whole, in chunks by hand, or fused by torch."""

    def __init__(self, width: int, words: int, way: str = "plain") -> None:
        super().__init__()
        self.out = nn.Linear(width, words, bias=False)
        self.way = way

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if self.way == "plain":
            return functional.cross_entropy(self.out(hidden), targets)
        if self.way == "linear_cross_entropy":
            fused: Callable[..., Tensor] = functional.linear_cross_entropy
            options = nn.LinearCrossEntropyOptions()
            return fused(hidden, self.out.weight, targets, options=options)
        count = min(CHUNKS, len(targets))
        chunks = zip(hidden.chunk(count), targets.chunk(count), strict=True)
        losses = [checkpoint(self._summed, h, t, use_reentrant=False) for h, t in chunks]
        return torch.stack(losses).sum() / len(targets)

    def _summed(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.out(hidden), targets, reduction="sum")


LOGITS_BYTES = 4 * 512 * 32000
# What pieces are to reach, from the peak of a plain step and the smallest budget without pieces.
GOALS: dict[str, dict[bool | str, Callable[[int, int], float]]] = {
    "head": {"exact": lambda plain, least: 140e6, True: lambda plain, least: 50e6},
    "llama": {
        "exact": lambda plain, least: 2.2 * LOGITS_BYTES,
        True: lambda plain, least: 0.8 * LOGITS_BYTES,
    },
    "gpt": {True: lambda plain, least: 0.7 * least},
    "unet": {
        "exact": lambda plain, least: plain * 12 / 50.9,
        True: lambda plain, least: plain * 10 / 50.9,
    },
}


@dataclass(frozen=True)
class Case:
    """A network with its loss, and other ways to write it that have the same parameters."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    by_hand: tuple[tuple[str, nn.Module], ...] = ()


def head(*, smoke: bool) -> Case:
    tokens, width, words = (16, 8, 64) if smoke else (512, 256, 32000)
    model = Head(width, words)
    others = []
    for way in ("checkpointed chunks", "linear_cross_entropy"):
        if way != "linear_cross_entropy" or hasattr(functional, way):
            other = copy.deepcopy(model)
            other.way = way
            others.append((way, other))
    hidden = torch.randn(tokens, width, requires_grad=True)
    return Case(model, (hidden, torch.randint(words, (tokens,))), tuple(others))


def cases(*, smoke: bool) -> Iterator[tuple[str, Case]]:
    yield "head", head(smoke=smoke)
    made = llama(2, 2, 64, 64, 16) if smoke else llama(2, 2, 256, 32000, 256)
    yield "llama", Case(made.model, tuple(made.sample))
    for name in ("gpt", "unet"):
        made = NETWORKS[name].case("smoke" if smoke else "cpu")
        yield name, Case(made.model, tuple(made.sample))


def smallest(case: Case, split: bool | str) -> int:
    """Return the smallest budget that is named for a network."""
    try:
        rk = Rockmate(copy.deepcopy(case.model), case.inputs, 1, split=split, self_test=False)
    except InfeasibleBudgetError as error:
        return error.minimum_bytes
    return rk.plan.peak_bytes


def step_of(module: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], list[Tensor | None]]:
    """Return a step, which adds its gradients to those of the one before."""

    def step() -> list[Tensor | None]:
        loss = module(*inputs)
        loss.backward()
        return [loss.detach(), *(leaf.grad for leaf in (*inputs, *module.parameters()))]

    return step


def first(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor | None]:
    """Return the loss and the gradients of a first step."""
    module.zero_grad(set_to_none=True)
    for given in inputs:
        given.grad = None
    return [t if t is None else t.clone() for t in step_of(module, inputs)()]


def measured(
    name: str, way: str, case: Case, module: nn.Module, repeats: int, **more: Any
) -> dict[str, object]:
    """Return the row of one way to run a network beside the plain one."""
    plain, other = step_of(case.model, case.inputs), step_of(module, case.inputs)
    for _ in range(LOOKS):  # first steps are recorded again
        other()
    same = all(map(same_bits, first(module, case.inputs), first(case.model, case.inputs)))
    peaks = [trace_memory(step, CPU).peak_bytes for step in (plain, other)]
    ratios = [1 / (timed_ms(plain, CPU) / timed_ms(other, CPU)) for _ in range(repeats)]
    row = {
        "network": name,
        "way": way,
        "plain_peak_bytes": peaks[0],
        "peak_bytes": peaks[1],
        "time_ratio": round(median(ratios), 3),
        "same_bits": same,
        **more,
        **environment(CPU),
    }
    print({key: row[key] for key in list(row)[:8]}, flush=True)
    return row


def not_run(name: str, way: str, why: str) -> dict[str, object]:
    """Return the row of a way that cannot be run."""
    print(f"{name}: {way}: {why}", flush=True)
    return {"network": name, "way": way, "why": why, **environment(CPU)}


def rows_of(name: str, case: Case, repeats: int, *, at_goals: bool) -> Iterator[dict[str, object]]:
    """Yield the rows of a network."""

    def planned(way: str, split: bool | str, budget: int) -> dict[str, object]:
        rk = Rockmate(copy.deepcopy(case.model), case.inputs, budget, split=split)
        cut = "; ".join(rk.plan.cut[:1])
        more = {"budget_bytes": budget, "predicted_bytes": rk.plan.peak_bytes, "cut": cut}
        return measured(name, way, case, rk, repeats, **more)

    nothing = {"budget_bytes": "", "predicted_bytes": "", "cut": ""}
    least = {split: smallest(case, split) for split in WAYS}
    plain_bytes = 0
    for split in WAYS:
        row = planned(f"smallest, split={split}", split, least[split])
        plain_bytes = int(str(row["plain_peak_bytes"]))
        yield row
    for split, goal in GOALS[name].items() if at_goals else ():
        way, budget = f"goal, split={split}", int(goal(plain_bytes, least[False]))
        if budget < least[split]:
            yield not_run(name, way, f"{budget} bytes are less than the least, {least[split]}")
        else:
            yield planned(way, split, budget)
    if name == "head":
        yield not_run(name, "Liger", WHY_NO_LIGER)
    for way, module in case.by_hand:
        row = measured(name, way, case, module, repeats, **nothing)
        yield row
        try:
            yield planned(f"split=True at the peak of {way}", True, int(str(row["peak_bytes"])))
        except InfeasibleBudgetError as error:
            print(f"{name}: no plan at the peak of {way}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny, to see that it runs")
    parser.add_argument("--only", default="", help="the name of one network")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    repeats = 1 if options.smoke else options.repeats
    rows = [
        row
        for name, case in cases(smoke=options.smoke)
        if options.only in ("", name)
        for row in rows_of(name, case, repeats, at_goals=not options.smoke)
    ]
    if not rows:
        parser.error(f"unknown network {options.only!r}; there are head, llama, gpt, unet")
    folder = RESULTS / "latest" / "smoke" if options.smoke else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "split.csv"
    new = {row["network"] for row in rows}
    old = [row for row in read_rows(file) if row["network"] not in new]
    write_csv(file, [*old, *rows])


if __name__ == "__main__":
    main()
