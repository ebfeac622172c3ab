"""`largest_batch`: the largest batch whose training step fits into the memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import nn

from rockmate.arguments import called_with
from rockmate.errors import InfeasibleBudgetError, UnknownChoiceError
from rockmate.estimate.costs_from_file import ByFlops, Cost, Costs, InProportion, costs_named
from rockmate.estimate.prediction import Estimate, Unmeasured, usual_device
from rockmate.estimate.sizes import priced_step, sizes_of
from rockmate.planners import minimum_peak
from rockmate.progress import Phases
from rockmate.reports.in_full import InFull
from rockmate.runtime.plain import plain
from rockmate.schedules.report import exact_bytes, format_bytes
from rockmate.settings import Budget, parse_memory
from rockmate.whole_step.loss import Loss, with_loss
from rockmate.whole_step.memory import Memory
from rockmate.whole_step.optimizers import check_optimizer
from rockmate.whole_step.whole_step import WholeStep

_log = logging.getLogger("rockmate")


@dataclass(frozen=True)
class LargestBatch(InFull):
    """The largest batches that fit into some memory; printing it shows a sentence.

    `plain` is the largest batch of plain PyTorch (0: not even one sample), `batch` that of Rockmate
    within `budget_bytes`. `overhead` is its extra time, as a share of a plain step of that batch.
    """

    memory_bytes: int
    plain: int
    batch: int
    budget_bytes: int
    overhead: float
    estimate: Estimate  # of `batch`

    def __repr__(self) -> str:
        return f"<largest batch: {self}>"

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


@dataclass(frozen=True, eq=False)
class ToFill(Unmeasured):
    """What `largest_batch` takes."""

    model: nn.Module
    make_sample: Callable[[int], Any]
    memory: Budget
    _: KW_ONLY
    cost: str | Mapping[int, Cost] = "flops"
    kwargs: Mapping[str, Any] | None = None
    loss: Loss | None = None
    at_most: int = 1 << 16
    function = "largest_batch"


@called_with(ToFill)
def largest_batch(given: ToFill) -> LargestBatch:
    """Return the largest batch whose training step fits into `memory`, and its extra time.

    Keywords are the fields of `Settings` beside these, as for `estimate`.

    Args:
        model: the module, in train mode; it may be on the device `meta`.
        make_sample: returns a sample of a given batch size, as `estimate` takes it; the sample may
            be on `meta` too. `kwargs` are the same for every size.
        memory: as for `Rockmate`: the limit of a whole step, with everything in `rk.memory`.
        optimizer: as for `Rockmate`.
        loss: as for `Rockmate`.
        device: see `estimate`.
        at_most: the largest batch to try.
        cost: the unit of extra time: "flops", or costs that were recorded at some batches, as
            `{8: "net.plan.json"}`; see `estimate`. Those of other batches are in proportion.
        offload: as for `estimate`.

    Example:
        >>> print(rockmate.largest_batch(model, lambda n: torch.randn(n, 3, 224, 224), "24GB"))

    Raises:
        InfeasibleBudgetError: not even one sample fits; `.minimum_bytes` would suffice for one.
        BudgetFormatError: the memory cannot be read, or is a fraction.
        UnknownChoiceError: the optimizer or the cost is unknown, or there is no such device.
        PlanMismatchError: recorded costs are not those of their batch.
        PlanFileError, rkgb.InvalidGraphError: a file of costs cannot be read.
    """
    if isinstance(given.optimizer, str):
        check_optimizer(given.optimizer)
    whole = WholeStep(parse_memory(given.memory), given.optimizer, given.reserve)
    recorded = _recorded_at(given.cost)
    given.check_times(recorded.values() or [ByFlops()])
    search = _Search(given, whole, usual_device(given.device), recorded)
    shares = {"one sample": 1, "plain batch": 2, "planned batch": 4, "extra time": 2}
    phases = Phases(shares, show=given.progress, title="search")
    with phases:
        found = _found(search, given.at_most, phases)
    phases.close("search")
    return found


def _found(search: _Search, at_most: int, phases: Phases) -> LargestBatch:
    with phases.phase("one sample"):
        memory = search.memory_at(1)
        needed = min(search.needed_bytes(1), search.plain_bytes(1))
        memory_bytes = memory.asked_bytes
    if needed > memory_bytes:
        raise InfeasibleBudgetError(
            f"not even one sample fits into {exact_bytes(memory_bytes)}: "
            f"it takes at least {exact_bytes(needed)}. Use smaller parameters, "
            f"another optimizer, or a smaller sample.\n{memory}",
            asked_bytes=memory_bytes,
            minimum_bytes=needed,
        )
    with phases.phase("plain batch"):
        plain = search.largest(search.plain_bytes, at_most, phases)
    with phases.phase("planned batch"):
        batch = search.largest(search.needed_bytes, at_most, phases, known=plain)
    found = search.at(batch)
    budget_bytes = search.memory_at(batch).budget_bytes
    with phases.phase("extra time"):
        overhead = 0.0 if batch == plain else found.at(budget_bytes).overhead
    return LargestBatch(memory_bytes, plain, batch, budget_bytes, overhead, found)


def _recorded_at(cost: str | Mapping[int, Cost]) -> dict[int, Costs]:
    """Return the recorded costs by batch; {} for FLOPs.

    Raises:
        UnknownChoiceError: it is neither "flops" nor costs by batch.
    """
    if cost == "flops":
        return {}
    if not isinstance(cost, Mapping) or not cost or not all(type(n) is int and n > 0 for n in cost):
        raise UnknownChoiceError(
            "cost", cost, ["flops"], "costs by the batch that they are for, as {8: 'net.plan.json'}"
        )
    return {batch: costs_named(one) for batch, one in cost.items()}


@dataclass
class _Search:
    given: ToFill
    whole: WholeStep
    device: torch.device
    recorded: Mapping[int, Costs]  # costs, by batch

    def __post_init__(self) -> None:
        self._estimates: dict[int, Estimate] = {}
        self._steps: dict[int, InProportion] = {}
        self._memories: dict[int, Memory] = {}
        self._model = with_loss(self.given.model, self.given.loss)

    def _costs_at(self, batch: int) -> Costs:
        """Return the costs of a step of that batch."""
        if not self.recorded or batch in self.recorded:
            return self.recorded.get(batch, ByFlops())
        near = min(self.recorded, key=lambda known: max(known / batch, batch / known))
        if near not in self._steps:
            costs, given = self.recorded[near], self.given
            step = priced_step(
                self._model, given.make_sample(near), given.kwargs, self.device, costs
            )
            words = f"{costs.words}, in proportion to a batch of {near}"
            self._steps[near] = step.in_proportion(words)
        return self._steps[near]

    def at(self, batch: int) -> Estimate:
        """Return the estimate of a batch; each batch is recorded once."""
        if batch not in self._estimates:
            given, costs = self.given, self._costs_at(batch)
            model, optimizer, sample = self._model, given.optimizer, given.make_sample(batch)
            split = bool(given.split)
            call = (model, sample, given.kwargs, optimizer, self.device, costs)
            sizes = sizes_of(*call, link=given.offload, split=split)
            self._estimates[batch] = Estimate(
                *(sizes, type(model).__name__, str(self.device)),
                *(4, costs.words, given.settings(cost="flops", reserve=0, offload=None)),
            )
        return self._estimates[batch]

    def memory_at(self, batch: int) -> Memory:
        """Return the table of the memory of a step of that batch, as `Rockmate` counts it."""
        if batch not in self._memories:
            given, sizes = self.given, self.at(batch).sizes
            model, sample = self._model, given.make_sample(batch)
            whole = replace(self.whole, optimizer=sizes.optimizer)
            with plain():
                call = whole.call_bytes(model, sample, given.kwargs, self.device)
            self._memories[batch] = whole.memory(model, call, device=self.device)
            _log.debug("batch %d: %d bytes plain", batch, self.plain_bytes(batch))
        return self._memories[batch]

    def plain_bytes(self, batch: int) -> int:
        """Return the bytes of a plain step."""
        return self.memory_at(batch).least_bytes(self.at(batch).activations_bytes)

    def needed_bytes(self, batch: int) -> int:
        """Return the bytes of a step of low memory: the least possible, or any that fit."""
        memory, estimate = self.memory_at(batch), self.at(batch)
        least = minimum_peak(estimate.problem, max(0, memory.budget_bytes))[1]
        is_more = estimate.sizes.cutting is not None or estimate.problem.link is not None
        if least > memory.budget_bytes and is_more:
            least = estimate.smallest_budget_bytes
        return memory.least_bytes(least)

    def largest(
        self, needed: Callable[[int], int], at_most: int, phases: Phases, known: int = 0
    ) -> int:
        """Return the largest batch that fits into the memory; `known` is one that fits.

        Memory grows nearly linearly with the batch. So the next guess is where a line through the
        last two batches meets the memory. The returned batch was recorded and fits, and a batch
        with one more sample does not fit.
        """
        fits, fails = known, at_most + 1
        guess = min(max(2 * known, 1), at_most)
        while fits + 1 < fails:
            guess = min(max(guess, fits + 1), fails - 1)
            phases.note(f"batch {guess}")
            if needed(guess) <= self.memory_at(guess).asked_bytes:
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
        step = (self.memory_at(base).asked_bytes - needed(base)) / slope
        return base + int(step) if abs(step) >= 1 else base + (1 if base == fits else -1)
