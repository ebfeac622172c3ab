"""`largest_batch`: how many samples a step can take in the memory that there is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import nn

from rockmate.arguments import called_with, refuse
from rockmate.errors import InfeasibleBudgetError, UnknownChoiceError
from rockmate.estimate.costs_from_file import Cost, InProportion, Recorded, recorded_costs
from rockmate.estimate.prediction import NOT_ESTIMATED, Estimate, usual_device
from rockmate.estimate.sizes import priced_step, sizes_of
from rockmate.planners import minimum_peak
from rockmate.progress import Phases
from rockmate.runtime.plain import plain
from rockmate.schedules.report import format_bytes
from rockmate.settings import Budget, Settings, parse_memory
from rockmate.whole_step import Memory, WholeStep, check_optimizer

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


@dataclass(frozen=True, eq=False)
class ToFill(Settings):
    """What `largest_batch` takes."""

    model: nn.Module
    make_sample: Callable[[int], Any]
    memory: Budget
    _: KW_ONLY
    cost: str | Mapping[int, Cost] = "flops"  # type: ignore[assignment]
    kwargs: Mapping[str, Any] | None = None
    optimizer: Any = "adamw"
    device: torch.device | str | None = None
    at_most: int = 1 << 16

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(self, "largest_batch", NOT_ESTIMATED)

    def _check_cost(self) -> None:
        """Leave it to `recorded_costs`."""


@called_with(ToFill)
def largest_batch(given: ToFill) -> LargestBatch:
    """Return the largest batch whose training step fits into `memory`, and at what extra time.

    Keywords are the fields of `Settings` beside these, as for `estimate`.

    Args:
        model: the module, in train mode; it may be on the device `meta`.
        make_sample: returns a sample of a given batch size, as `estimate` takes it; it may be
            on `meta` as well. `kwargs` are the same for every size.
        memory: as for `Rockmate`: what a whole step may take, with all that `rk.memory` names.
        optimizer: as for `Rockmate`.
        device: see `estimate`.
        at_most: no larger batch is looked at.
        cost: what extra time is counted in: "flops", or costs that were recorded at some batches,
            as `{8: "net.plan.json"}`; see `estimate`. Those of other batches are in proportion.

    Example:
        >>> print(rockmate.largest_batch(model, lambda n: torch.randn(n, 3, 224, 224), "24GB"))

    Raises:
        InfeasibleBudgetError: not even one sample fits; `.minimum_bytes` is what it would take.
        BudgetFormatError: the memory cannot be read, or is a fraction.
        UnknownChoiceError: the optimizer or the cost is not known, or the device is not here.
        PlanMismatchError: the recorded costs are not for the batch that they are said to be for.
        PlanFileError, rkgb.InvalidGraphError: a file of costs cannot be read.
    """
    if isinstance(given.optimizer, str):
        check_optimizer(given.optimizer)
    whole = WholeStep(parse_memory(given.memory), given.optimizer, given.reserve)
    search = _Search(given, whole, usual_device(given.device), _recorded_at(given.cost))
    shares = {"one sample": 1, "plain batch": 2, "planned batch": 4, "extra time": 2}
    phases = Phases(shares, show=given.progress, title="search")
    with phases:
        found = _found(search, given.at_most, phases)
    phases.close("search")
    return found


def _found(search: _Search, at_most: int, phases: Phases) -> LargestBatch:
    with phases.phase("one sample"):
        memory = search.memory_at(1)
        needed, memory_bytes = (
            min(search.needed_bytes(1), search.plain_bytes(1)),
            memory.asked_bytes,
        )
    if needed > memory_bytes:
        raise InfeasibleBudgetError(
            f"not even one sample fits into {memory_bytes} bytes ({format_bytes(memory_bytes)}): "
            f"it takes at least {needed} bytes ({format_bytes(needed)}). Use smaller parameters, "
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
class _Search:
    given: ToFill
    whole: WholeStep
    device: torch.device
    recorded: Mapping[int, Recorded]  # costs, by batch

    def __post_init__(self) -> None:
        self._estimates: dict[int, Estimate] = {}
        self._steps: dict[int, InProportion] = {}
        self._memories: dict[int, Memory] = {}

    def _costs_at(self, batch: int) -> Recorded | InProportion | None:
        """Return what a step of that batch costs; None where FLOPs count."""
        if not self.recorded or batch in self.recorded:
            return self.recorded.get(batch)
        near = min(self.recorded, key=lambda known: max(known / batch, batch / known))
        if near not in self._steps:
            costs, given = self.recorded[near], self.given
            step = priced_step(
                given.model, given.make_sample(near), given.kwargs, self.device, costs
            )
            words = f"{costs.words}, in proportion to a batch of {near}"
            self._steps[near] = step.in_proportion(words)
        return self._steps[near]

    def at(self, batch: int) -> Estimate:
        """Return the estimate of a batch, recorded once."""
        if batch not in self._estimates:
            given, costs = self.given, self._costs_at(batch)
            model, optimizer, sample = given.model, given.optimizer, given.make_sample(batch)
            sizes = sizes_of(model, sample, given.kwargs, optimizer, self.device, costs)
            times = "FLOPs" if costs is None else costs.words
            self._estimates[batch] = Estimate(
                *(sizes, type(model).__name__, str(self.device)),
                *(4, times, given.settings(cost="flops", reserve=0)),
            )
        return self._estimates[batch]

    def memory_at(self, batch: int) -> Memory:
        """Return where each byte of a step of that batch goes, as `Rockmate` would count."""
        if batch not in self._memories:
            given, sizes = self.given, self.at(batch).sizes
            model, sample = given.model, given.make_sample(batch)
            whole = replace(self.whole, optimizer=sizes.optimizer)
            with plain():
                call = whole.call_bytes(model, sample, given.kwargs, self.device)
            self._memories[batch] = whole.memory(model, call, device=self.device)
            _log.debug("batch %d: %d bytes plain", batch, self.plain_bytes(batch))
        return self._memories[batch]

    def plain_bytes(self, batch: int) -> int:
        """Return what a plain step takes."""
        return self.memory_at(batch).least_bytes(self.at(batch).activations_bytes)

    def needed_bytes(self, batch: int) -> int:
        """Return what a step of least memory takes; it need not be the least where that fits."""
        memory = self.memory_at(batch)
        least = minimum_peak(self.at(batch).problem, max(0, memory.budget_bytes))[1]
        return memory.least_bytes(least)

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
