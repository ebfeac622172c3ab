"""A copy of a module to run a step on, so that nothing of the user's is touched."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rkgb.errors import TraceError
from rkgb.torch_api.torch_private import mode_of


@dataclass(frozen=True)
class Twin:
    """A copy of a module, and which objects of the module its parts are copies of."""

    module: nn.Module
    originals: Mapping[int, Any]  # identity of a copy -> what it is a copy of


def twin_of(model: nn.Module) -> Twin:
    """Return a copy whose parameters are new leaves on the same memory, and buffers clones.

    Raises:
        TraceError: the module cannot be copied.
    """
    mode = mode_of(next(model.parameters(), None))
    memo: dict[int, Any] = {id(mode): mode}  # of tensors without content, which copies share
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    for module in model.modules():  # what a step has left there belongs to autograd's graph
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach()
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} cannot be deep-copied ({error}), which recording a step of it "
            "needs. Make the module copyable."
        ) from error
    kept_alive = memo.get(id(memo), [])  # by deepcopy itself: everything that has a copy
    return Twin(twin, {id(memo[id(old)]): old for old in kept_alive if id(old) in memo})
