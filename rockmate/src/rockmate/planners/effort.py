"""How much work planning may take: by name, or in seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from rockmate.errors import UnknownChoiceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Limits of the planners' work; all but `seconds` are deterministic."""

    whole_nodes: int  # graphs of at most this many nodes are solved whole
    unlike_nodes: int  # the same limit, if most blocks differ
    hinted_nodes: int  # the same limit, with the best plan so far as a hint
    whole_limit: float  # deterministic seconds, about four to ten of the clock
    hinted_limit: float  # the same, if there is a good plan already
    unhinted_limit: float  # the same, if the solver cannot start from the plan
    block_limit: float  # the same, for each block and budget
    windows: int  # number of windows that the search solves
    window_limit: float  # deterministic seconds for each of them
    grains: int  # number of block sizes to try
    bound_cuts: int  # largest number of cuts in the lower bound
    close_enough: float  # gap to the bound, relative to the step, that ends the search
    whole_enough: float  # gap below which the whole graph is not solved after a search
    small_enough: float  # gap below which chains are not tried on small graphs
    thorough_minimum: bool = False  # search for minutes before a budget is refused
    smaller: str = ""  # the next smaller effort, whose plans come first; then none is worse
    seconds: float | None = None  # of the processor


# Fast, balanced, best.
_LIMITS: dict[str, tuple[Any, Any, Any]] = {
    "whole_nodes": (55, 80, 120),
    "unlike_nodes": (100, 80, 120),
    "hinted_nodes": (100, 120, 160),
    "whole_limit": (0.15, 0.8, 2.0),
    "hinted_limit": (0.1, 0.3, 2.0),
    "unhinted_limit": (0.05, 0.2, 0.5),
    "block_limit": (0.05, 0.2, 0.5),
    "windows": (24, 60, 400),
    "window_limit": (0.02, 0.05, 0.1),
    "grains": (2, 2, 3),
    "bound_cuts": (1, 2, 3),
    "close_enough": (2e-3, 5e-4, 1e-4),
    "whole_enough": (5e-3, 1e-3, 1e-4),
    "small_enough": (0.01, 0.02, 0.0),
    "thorough_minimum": (False, False, True),
    "smaller": ("", "fast", "balanced"),
}
EFFORTS = {
    name: Effort(**{limit: values[place] for limit, values in _LIMITS.items()})
    for place, name in enumerate(("fast", "balanced", "best"))
}


def effort_of(effort: str | float) -> Effort:
    """Return the limits of an effort: a name, or seconds.

    Raises:
        UnknownChoiceError: the name is unknown, or the number of seconds is not positive.
    """
    if isinstance(effort, str) and effort in EFFORTS:
        return EFFORTS[effort]
    # In Python True is the number 1. NaN is not above zero.
    is_number = isinstance(effort, Real) and not isinstance(effort, bool)
    if isinstance(effort, str) or not is_number or not effort > 0:
        raise UnknownChoiceError("effort", effort, EFFORTS, "a positive number of seconds")
    # The clock alone ends the search. What is done until then must not depend on the seconds.
    return replace(EFFORTS["best"], thorough_minimum=False, seconds=float(effort))


def ladder(effort: Effort) -> tuple[Effort, ...]:
    """Return the smaller efforts in turn, smallest first, with the same seconds; then itself."""
    if not effort.smaller:
        return (effort,)
    smaller = replace(EFFORTS[effort.smaller], seconds=effort.seconds)
    return (*ladder(smaller), effort)
