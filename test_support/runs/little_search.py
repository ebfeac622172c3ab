"""Plans that are only run need not be good: let every planner take its part and end soon.

A third of the time of such tests went into searches for plans that are a little faster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

_ROOT = Path(__file__).parents[2]
# Folders and files of tests that run plans, and assert nothing of how good they are.
_ONLY_RUN = {"rockmate", "examples", "test_gpu_probe.py", "test_lengths.py", "test_users.py"}
_OF_PLANS = {"plans", "solvers"}


@contextmanager
def little_search(path: str | Path) -> Iterator[None]:
    """Search little for the tests of this file, where they only run plans."""
    around = {*Path(path).relative_to(_ROOT).parts}
    if not around & _ONLY_RUN or around & _OF_PLANS:
        yield
        return
    from rockmate.options.options import Grid
    from rockmate.planners import chain, module_options
    from rockmate.planners.effort import EFFORTS
    from rockmate.solvers import bound

    limits: dict[str, Any] = dict.fromkeys(("whole_limit", "hinted_limit", "unhinted_limit"), 0.01)
    limits |= {"windows": 1, "window_limit": 0.005, "block_limit": 0.01, "bound_cuts": 0}
    little = dataclasses.replace(EFFORTS["fast"], **limits)
    with (
        mock.patch.dict(EFFORTS, fast=little),
        mock.patch.object(chain, "_grid", return_value=Grid(2, 3)),
        mock.patch.object(module_options, "_grid", return_value=Grid(3, 4)),
        mock.patch.object(module_options, "_BOX_LIMIT", 0.01),
        mock.patch.object(bound, "_INTEGER_NODES", 0),  # the linear program alone
    ):
        yield
