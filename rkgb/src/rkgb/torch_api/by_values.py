"""Kernels whose workspace depends on values: they are measured where it is largest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rkgb.torch_api.patches import Patches
from rkgb.torch_api.private.modes import DispatchMode

# It holds more matrices the larger their norms are, up to this one.
_BY_NORM, _LARGE = torch.ops.aten.linalg_matrix_exp.default, 8.0
_PLACES = (torch, torch.linalg, Tensor)


def takes_by_values(target: Any) -> bool:
    """Return whether the workspace of a kernel depends on values."""
    return target is _BY_NORM


def taking_most(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments for which a kernel has its largest workspace."""
    return (torch.full_like(args[0], _LARGE),) if takes_by_values(target) else args


class TakingMost(DispatchMode):
    """While active, such kernels run once more, with their largest workspaces."""

    only_watches = True

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if takes_by_values(func):
            func(*taking_most(func, args), **kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def noting_calls() -> Iterator[list[None]]:
    """Give a list that gets an entry for each call of such a kernel from Python."""
    called: list[None] = []
    exponential = torch.matrix_exp

    def noting(matrix: Tensor) -> Tensor:
        called.append(None)
        return exponential(matrix)

    with Patches([(place, "matrix_exp", noting) for place in _PLACES]):
        yield called
