"""A copy of a module to run a step on, so that nothing of the user's is touched."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rkgb.errors import TraceError


def twin_of(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters are new leaves on the same memory, and buffers clones.

    Raises:
        TraceError: the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} cannot be deep-copied ({error}), which recording a step of it "
            "needs. Make the module copyable."
        ) from error


def detached_inputs(tree: Any) -> Any:
    """Return the inputs with every tensor a new leaf on the same memory."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), tree)
