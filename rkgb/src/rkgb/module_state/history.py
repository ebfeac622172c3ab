"""Tensors with history that a module keeps: a step of the user's has made them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from rkgb.outside.held import OF_MODULE
from rkgb.torch_api.private.tables import pytree


@contextlib.contextmanager
def without_history(model: nn.Module) -> Iterator[None]:
    """While active, a model keeps leaves where it keeps tensors of earlier steps.

    A backward of a step would go on through these steps, and free what a user's backward of them
    will read.
    """
    leaves: dict[int, Tensor] = {}

    def leaf(kept: Tensor) -> Tensor:
        if kept.grad_fn is None:
            return kept
        return leaves.setdefault(id(kept), kept.detach().requires_grad_())

    before: list[tuple[dict[str, Any], str, Any]] = []
    for table in (table for part in model.modules() for table in (vars(part), part._buffers)):
        for name, value in table.items():
            if name not in OF_MODULE and _has_history(value):
                before.append((table, name, value))
                table[name] = pytree.tree_map_only(Tensor, leaf, value)
    try:
        yield
    finally:
        for table, name, value in before:
            table[name] = value


def _has_history(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return any(map(_has_history, pytree.tree_leaves(value)))
    return isinstance(value, Tensor) and value.grad_fn is not None
