"""Wrap a module as the tests do: planned by counted operations, the same on every machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import nn

from rockmate.module import Rockmate
from rockmate.planners import portfolio
from rockmate.problems.problem import Problem
from rockmate.schedules.baselines import checkpoint_segments, chen, no_recomputation
from rockmate.schedules.steps import Steps
from rockmate.settings import Budget


def wrap(model: nn.Module, sample: Any, budget: Budget = 0.8, **options: Any) -> Rockmate:
    """Return `model` wrapped, planned with `cost="flops"`, and fast: few tests are of plans."""
    return Rockmate(model, sample, budget, **{"cost": "flops", "effort": "fast", **options})


@contextlib.contextmanager
def computing_again(planner: str = "recompute_all") -> Iterator[None]:
    """While active, plans recompute within budgets that have room for everything, too.

    A planner is only asked where not all can be kept, which is in no small network. "chen" gives
    its own plan; "recompute_all" that which computes all nodes again but the last.
    """
    with mock.patch.object(portfolio, "no_recomputation", _AGAIN.get(planner, no_recomputation)):
        yield


def _all_again(problem: Problem) -> Steps:
    return checkpoint_segments(problem, [0, max(1, len(problem.nodes) - 1)])


_AGAIN = {"recompute_all": _all_again, "chen": chen}
