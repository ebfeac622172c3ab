"""Plans whose steps stay within the budget as the device counts: in blocks of its allocator.

The rounding to blocks is known only after a step has run. So a plan is tried; its excess is
reserved, and the next plan is made within the rest. If no plan fits any more, the plan of least
bytes is tried: either it fits, or its measured peak is the smallest budget.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from rkgb.engine import Sample, device_of
from rockmate.comparison.eager import StepResult
from rockmate.errors import InfeasibleBudgetError
from rockmate.networks.planned import Planned
from rockmate.networks.self_test import over_budget, refuse_wrong_prediction

_log = logging.getLogger("rockmate")
_MOST_TRIES = 5
# Makes a plan within a budget, with this many bytes reserved for blocks.
Make = Callable[[int, int], Planned]
# Tries a plan; returns it with its measurements, and the step.
Try = Callable[[Planned], tuple[Planned, StepResult]]


def has_blocks(sample: Sample) -> bool:
    """Return whether the allocator of this device rounds requests up to blocks."""
    return device_of(sample.device).block_bytes(1) != 1


def within_blocks(
    make: Make, attempt: Try, model: nn.Module, sample: Sample, budget_bytes: int, aside_bytes: int
) -> Planned:
    """Return a tried plan whose peak, in whole blocks, is within the budget.

    Raises:
        InfeasibleBudgetError: there is none; it names the peak of the least plan, in whole blocks.
        SelfTestError: a step took more than was predicted, on a device without blocks.
    """
    for left in reversed(range(_MOST_TRIES)):
        try:
            planned, ours = attempt(make(budget_bytes, aside_bytes))
        except InfeasibleBudgetError as refusal:
            if not has_blocks(sample):
                raise
            least_bytes = refusal.minimum_bytes - aside_bytes
            return _least(make, attempt, budget_bytes, least_bytes, refusal)
        over_bytes = ours.allocated_peak_bytes - budget_bytes
        if over_bytes <= 0:
            return planned
        refuse_wrong_prediction(planned, model, ours)
        _log.info("%d bytes over the budget in whole blocks: planning again", over_bytes)
        # In the last round no plan fits, which leads to the plan of least bytes.
        aside_bytes = planned.blocks_bytes + 2 * over_bytes if left > 1 else budget_bytes
    raise over_budget(planned, model)


def _least(
    make: Make,
    attempt: Try,
    budget_bytes: int,
    least_bytes: int,
    refusal: InfeasibleBudgetError,
) -> Planned:
    """Return the plan of least bytes if it fits.

    Raises:
        InfeasibleBudgetError: it does not; the error names its peak in whole blocks.
    """
    within_bytes = max(budget_bytes, least_bytes)
    planned, ours = attempt(make(within_bytes, within_bytes - least_bytes))
    peak_bytes = ours.allocated_peak_bytes
    if peak_bytes <= budget_bytes and least_bytes <= budget_bytes:
        return planned
    minimum_bytes = max(peak_bytes, least_bytes)
    raise refusal.reworded(
        f"{refusal}. Tried out, the plan of least bytes takes {minimum_bytes} bytes in whole "
        "blocks of the allocator, which are larger than what lies in them (less with "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True): that is the smallest budget",
        asked_bytes=budget_bytes,
        minimum_bytes=minimum_bytes,
    ) from None
