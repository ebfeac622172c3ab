"""From a measured chain and a limit to its schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rotor.errors import InfeasibleBudgetError, MemoryLimitError, format_bytes
from rotor.runtime.device import device_of
from rotor.runtime.measure import Measurement
from rotor.runtime.memory import OPTIMIZER_BYTES_PER_NUMBER
from rotor.schedules.simulate import Schedule
from rotor.solver.intervals import MAX_STAGES, improve_with_intervals
from rotor.solver.table import DEFAULT_SLOTS
from rotor.strategies import STRATEGIES, no_checkpointing


@dataclass(frozen=True)
class Choice:
    """How schedules are made: the strategy, its arguments, and the solver's table."""

    slots: int = DEFAULT_SLOTS
    strategy: str = "optimal"
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs_limit(self) -> bool:
        """Whether the strategy cannot plan without a limit."""
        return self.strategy == "optimal" or (self.strategy == "revolve" and not self.arguments)


def schedule_within(measurement: Measurement, limit_bytes: int | None, choice: Choice) -> Schedule:
    """Return the schedule of a measured chain whose predicted peak is within the limit.

    Raises:
        InfeasibleBudgetError: no schedule fits. Its minimum includes what is held beside the chain.
    """
    chain, held_bytes = measurement.chain, measurement.held_bytes
    budget = None if limit_bytes is None else limit_bytes - held_bytes
    try:
        if choice.strategy == "optimal":
            assert budget is not None
            return _optimal(measurement, budget, choice)
        return STRATEGIES[choice.strategy](chain, budget, **choice.arguments)
    except InfeasibleBudgetError as error:
        assert limit_bytes is not None
        raise InfeasibleBudgetError(
            limit_bytes,
            error.minimum_bytes + held_bytes,
            len(chain),
            f"Of these, {format_bytes(held_bytes)} are held through the whole step (the output, "
            f"and copies for recomputation). Without recomputation the step takes "
            f"{format_bytes(plain_bytes(measurement))}.",
        ) from None


def _optimal(measurement: Measurement, budget_bytes: int, choice: Choice) -> Schedule:
    chain = measurement.chain
    options = {"slots": choice.slots, **choice.arguments}
    intervals = options.pop("intervals", len(chain) <= MAX_STAGES)
    problem: InfeasibleBudgetError | None = None
    schedule: Schedule | None = None
    try:
        schedule = STRATEGIES["optimal"](chain, budget_bytes, **options)
    except InfeasibleBudgetError as error:
        problem = error
    if intervals and budget_bytes > 0:
        # Dropping an input frees nothing if the stage's output shares its memory.
        schedule = improve_with_intervals(
            chain, budget_bytes, schedule, forget_inputs=not measurement.passes_inputs_on
        )
    if schedule is None:
        assert problem is not None
        raise problem
    return schedule


def free_limit_bytes(device: torch.device, parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes that are free for a step once gradients and optimizer states exist.

    Raises:
        MemoryLimitError: the device does not say what is free.
    """
    # Before the first step neither gradients nor optimizer states exist.
    missing = [p for p in parameters if p.requires_grad and p.grad is None]
    coming = sum(p.nbytes + OPTIMIZER_BYTES_PER_NUMBER * p.numel() for p in missing)
    usable = device_of(device).usable_bytes(coming)
    if usable is None:
        raise MemoryLimitError(
            f"no memory limit is given, and on the {device.type} device there is none to "
            f"find out. Give one: Checkpointable(model, budget=...) or "
            f"compute_sequence(mem_limit=...)."
        )
    return usable


def in_bytes(limit: int | float | None, measurement: Measurement) -> int | None:
    """Return a limit in bytes; a fraction is one of `plain_bytes`."""
    return int(limit * plain_bytes(measurement)) if isinstance(limit, float) else limit


def plain_bytes(measurement: Measurement) -> int:
    """Return the predicted peak of a step without recomputation, `held_bytes` included."""
    return no_checkpointing(measurement.chain).peak_bytes + measurement.held_bytes
