"""Outputs beside the loss: whether the caller still holds them during the backward.

A plan for losses only assumes that logits and hidden states are dropped before the backward, as in
`model(**batch).loss.backward()`. If the caller holds them, their bytes exceed the budget.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class OutputsHeld:
    """Watches the outputs of a step by weak references."""

    def __init__(self, outputs: Mapping[str, Tensor]) -> None:
        found = [(name, tensor.untyped_storage()) for name, tensor in outputs.items()]
        self._rows = [(name, StorageWeakRef(s), s.nbytes()) for name, s in found]

    def warn_above(self, room_bytes: int, model_name: str) -> bool:
        """Warn, and return True, if the held outputs exceed the headroom."""
        held = [(name, size) for name, storage, size in self._rows if not storage.expired()]
        held_bytes = sum(size for _, size in held)
        if held_bytes <= room_bytes:
            return False
        names = ", ".join(f"'{name}'" for name, _ in held)
        warnings.warn(
            f"outputs of {model_name} beside its loss ({names}, {held_bytes} bytes) are held while "
            f"its backward runs, which takes {held_bytes - room_bytes} bytes more than the budget. "
            "Let go of them before the backward: `loss = model(...).loss`, or `del outputs`; or "
            "raise the budget.",
            RuntimeWarning,
            stacklevel=2,
        )
        return True
