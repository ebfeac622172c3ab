"""How much work planning may take: by name, or in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

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
    seconds: float | None = None  # of the clock


EFFORTS = {
    "fast": Effort(
        whole_nodes=55,
        unlike_nodes=100,
        hinted_nodes=100,
        whole_limit=0.15,
        hinted_limit=0.1,
        unhinted_limit=0.05,
        block_limit=0.05,
        windows=24,
        window_limit=0.02,
        grains=2,
        bound_cuts=1,
        close_enough=2e-3,
        whole_enough=5e-3,
        small_enough=0.01,
    ),
    "balanced": Effort(
        whole_nodes=80,
        unlike_nodes=80,
        hinted_nodes=120,
        whole_limit=0.8,
        hinted_limit=0.3,
        unhinted_limit=0.2,
        block_limit=0.2,
        windows=60,
        window_limit=0.05,
        grains=2,
        bound_cuts=2,
        close_enough=5e-4,
        whole_enough=3e-3,
        small_enough=0.02,
    ),
    "best": Effort(
        whole_nodes=120,
        unlike_nodes=120,
        hinted_nodes=160,
        whole_limit=2.0,
        hinted_limit=2.0,
        unhinted_limit=0.5,
        block_limit=0.5,
        windows=400,
        window_limit=0.1,
        grains=3,
        bound_cuts=3,
        close_enough=1e-4,
        whole_enough=1e-4,
        small_enough=0.0,
        thorough_minimum=True,
    ),
}

_SHORT_SECONDS = 15  # below this, blocks get the limits of "fast"


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
    return Effort(
        whole_nodes=120,
        unlike_nodes=120,
        hinted_nodes=160,
        whole_limit=2.0,
        hinted_limit=2.0,
        unhinted_limit=0.5,
        block_limit=0.05 if effort < _SHORT_SECONDS else 0.2,
        windows=1_000_000,  # the clock ends the search
        window_limit=0.05,
        grains=2,
        bound_cuts=2,
        close_enough=1e-4,
        whole_enough=1e-4,
        small_enough=0.0,
        seconds=float(effort),
    )
