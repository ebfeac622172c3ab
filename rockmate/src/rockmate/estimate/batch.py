"""`largest_batch`: how many samples a step can take in the memory that there is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rockmate.errors import BudgetFormatError, InfeasibleBudgetError, UnknownChoiceError
from rockmate.estimate.costs_from_file import Cost, InProportion, Recorded, recorded_costs
from rockmate.estimate.prediction import Estimate, usual_device
from rockmate.estimate.sizes import check_optimizer, priced_step, sizes_of
from rockmate.planners import minimum_peak
from rockmate.progress import Phases
from rockmate.schedules.report import format_bytes
from rockmate.settings import Budget, parse_budget

_log = logging.getLogger("rockmate")


@dataclass(frozen=True)
class LargestBatch:
    """The largest batches that fit into some memory; printing it says so in words.

    `plain` is that of plain PyTorch (0: not even one), `batch` that of Rockmate, whose step takes
    `overhead` more time than a plain one of that batch would, within `budget_bytes`.
    """

    memory_bytes: int
    plain: int
    batch: int
    budget_bytes: int
    overhead: float
    estimate: Estimate  # of `batch`

    def __str__(self) -> str:
        return (
            f"in {format_bytes(self.memory_bytes)}: {self.plain or 'no'} samples plain, "
            f"{self.batch} with a budget of {format_bytes(self.budget_bytes)} for activations, "
            f"at {100 * self.overhead:.1f} % more time, counted in {self.estimate.times}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return every figure, for JSON."""
        return {
            "memory_bytes": self.memory_bytes,
            "plain": self.plain,
            "batch": self.batch,
            "budget_bytes": self.budget_bytes,
            "overhead": self.overhead,
            "estimate": self.estimate.to_dict(),
        }


def largest_batch(
    model: nn.Module,
    make_sample: Callable[[int], Any],
    memory: Budget,
    *,
    optimizer: str = "adamw",
    device: torch.device | str | None = None,
    at_most: int = 1 << 16,
    cost: str | Mapping[int, Cost] = "flops",
    progress: bool | None = None,
) -> LargestBatch:
    """Return the largest batch whose training step fits into `memory`, and at what extra time.

    Args:
        model: the module, in train mode; it may be on the device `meta`.
        make_sample: returns a sample of a given batch size, as `estimate` takes it; it may be
            on `meta` as well.
        memory: of the device, in bytes or as text such as `"24GB"`: parameters, gradients,
            the optimizer's state, inputs and activations together.
        optimizer: see `estimate`.
        device: see `estimate`.
        at_most: no larger batch is looked at.
        cost: what extra time is counted in: "flops", or costs that were recorded at some batches,
            as `{8: "net.plan.json"}`; see `estimate`. Those of other batches are in proportion.
        progress: show a bar with the batch that is tried; by default in a terminal and a notebook.

    Example:
        >>> print(rockmate.largest_batch(model, lambda n: torch.randn(n, 3, 224, 224), "24GB"))

    Raises:
        InfeasibleBudgetError: not even one sample fits; `.minimum_bytes` is what it would take.
        BudgetFormatError: the memory cannot be read, or is a fraction.
        UnknownChoiceError: the optimizer or the cost is not known, or the device is not here.
        PlanMismatchError: the recorded costs are not for the batch that they are said to be for.
        PlanFileError, rkgb.InvalidGraphError: a file of costs cannot be read.
    """
    check_optimizer(optimizer)
    memory_bytes, _ = parse_budget(memory)
    if memory_bytes is None:
        raise BudgetFormatError(f"memory {memory!r} is a fraction. Give bytes or text as '24GB'.")
    where = usual_device(device)
    costs = _Costs(model, make_sample, where, _recorded_at(cost))
    search = _Search(model, make_sample, memory_bytes, optimizer, where, costs, progress)
    shares = {"one sample": 1, "plain batch": 2, "planned batch": 4, "extra time": 2}
    phases = Phases(shares, show=progress, title="search")
    with phases:
        found = _found(search, at_most, phases)
    phases.close("search")
    return found


def _found(search: _Search, at_most: int, phases: Phases) -> LargestBatch:
    memory_bytes = search.memory_bytes
    with phases.phase("one sample"):
        needed = min(search.needed_bytes(1), search.plain_bytes(1))
    if needed > memory_bytes:
        raise InfeasibleBudgetError(
            f"not even one sample fits into {memory_bytes} bytes ({format_bytes(memory_bytes)}): "
            f"it takes at least {needed} bytes ({format_bytes(needed)}), "
            f"{search.at(1).sizes.resident_bytes} of them for parameters, gradients and the "
            "optimizer's state. Use smaller parameters, another optimizer, or a smaller sample",
            asked_bytes=memory_bytes,
            minimum_bytes=needed,
        )
    with phases.phase("plain batch"):
        plain = search.largest(search.plain_bytes, at_most, phases)
    with phases.phase("planned batch"):
        batch = search.largest(search.needed_bytes, at_most, phases, known=plain)
    found = search.at(batch)
    budget_bytes = memory_bytes - found.sizes.resident_bytes
    with phases.phase("extra time"):
        overhead = 0.0 if batch == plain else found.at(budget_bytes).overhead
    return LargestBatch(memory_bytes, plain, batch, budget_bytes, overhead, found)


def _recorded_at(cost: str | Mapping[int, Cost]) -> dict[int, Recorded]:
    """Return the recorded costs by batch; none where FLOPs count.

    Raises:
        UnknownChoiceError: it is neither "flops" nor costs by batch.
    """
    if cost == "flops":
        return {}
    if not isinstance(cost, Mapping) or not cost or not all(type(n) is int and n > 0 for n in cost):
        raise UnknownChoiceError(
            "cost", cost, ["flops"], "costs by the batch that they are for, as {8: 'net.plan.json'}"
        )
    found = {batch: recorded_costs(one) for batch, one in cost.items()}
    return {batch: one for batch, one in found.items() if one is not None}


@dataclass
class _Costs:
    """Costs at any batch, from those that were recorded at some."""

    model: nn.Module
    make_sample: Callable[[int], Any]
    device: torch.device
    recorded: dict[int, Recorded]

    def __post_init__(self) -> None:
        self._steps: dict[int, InProportion] = {}

    def at(self, batch: int) -> Recorded | InProportion | None:
        """Return what a step of that batch costs; None where FLOPs count."""
        if not self.recorded or batch in self.recorded:
            return self.recorded.get(batch)
        near = min(self.recorded, key=lambda known: max(known / batch, batch / known))
        if near not in self._steps:
            costs = self.recorded[near]
            step = priced_step(self.model, self.make_sample(near), None, self.device, costs)
            words = f"{costs.words}, in proportion to a batch of {near}"
            self._steps[near] = step.in_proportion(words)
        return self._steps[near]


@dataclass
class _Search:
    model: nn.Module
    make_sample: Callable[[int], Any]
    memory_bytes: int
    optimizer: str
    device: torch.device
    costs: _Costs
    progress: bool | None

    def __post_init__(self) -> None:
        self._estimates: dict[int, Estimate] = {}

    def at(self, batch: int) -> Estimate:
        """Return the estimate of a batch, recorded once."""
        if batch not in self._estimates:
            costs = self.costs.at(batch)
            sample = self.make_sample(batch)
            sizes = sizes_of(
                self.model, sample, None, optimizer=self.optimizer, device=self.device, costs=costs
            )
            times = "FLOPs" if costs is None else costs.words
            self._estimates[batch] = Estimate(
                *(sizes, type(self.model).__name__, self.optimizer, str(self.device)),
                *(4, times, self.progress),
            )
            _log.debug("batch %d: %d bytes plain", batch, self.plain_bytes(batch))
        return self._estimates[batch]

    def plain_bytes(self, batch: int) -> int:
        """Return what a plain step takes."""
        return self.at(batch).total_bytes

    def needed_bytes(self, batch: int) -> int:
        """Return what a step of least memory takes; it need not be the least where that fits."""
        found = self.at(batch)
        room = max(0, self.memory_bytes - found.sizes.resident_bytes)
        least = minimum_peak(found.problem, room)[1]
        return found.sizes.resident_bytes + least

    def largest(
        self, needed: Callable[[int], int], at_most: int, phases: Phases, known: int = 0
    ) -> int:
        """Return the largest batch that needs no more than there is; `known` is one that does.

        Memory grows with the batch, nearly as a line, so the next guess is where a line through
        the last two meets what there is; what is returned has been recorded and fits, and one
        more sample does not.
        """
        fits, fails = known, at_most + 1
        guess = min(max(2 * known, 1), at_most)
        while fits + 1 < fails:
            guess = min(max(guess, fits + 1), fails - 1)
            phases.note(f"batch {guess}")
            if needed(guess) <= self.memory_bytes:
                fits = guess
            else:
                fails = guess
            guess = self._next(needed, fits, fails)
        return fits

    def _next(self, needed: Callable[[int], int], fits: int, fails: int) -> int:
        known = sorted(self._estimates)
        if len(known) < 2:
            return 2 * fits if fits else 1
        low, high = known[0], min(fails, known[-1]) if fails in self._estimates else known[-1]
        if low == high:
            return (fits + fails) // 2
        slope = (self.plain_bytes(high) - self.plain_bytes(low)) / (high - low)
        ends = [b for b in (fits, fails) if b in self._estimates]
        base = ends[-1]
        if slope <= 0:
            return (fits + fails) // 2
        step = (self.memory_bytes - needed(base)) / slope
        return base + int(step) if abs(step) >= 1 else base + (1 if base == fits else -1)
