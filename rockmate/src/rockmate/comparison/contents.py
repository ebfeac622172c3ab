"""Detects changes of tensors during a step that raise no version.

Plain PyTorch does not count edits through `.data`, numpy, dlpack or another process that shares the
memory. Its backward reads the present content. A recomputation would then compute other values than
the forward. Only a comparison of contents can detect this, and it takes time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rkgb.torch_api import straight_to_kernels
from rockmate.comparison.fingerprint import Fingerprints
from rockmate.guards.sharded import local_part

_MOST = 1 << 20  # elements of a tensor that are compared: whole rows, evenly spread


class Contents:
    """Fingerprints of tensors by name, and the tensors."""

    _fingerprints = Fingerprints()  # its memory is allocated before any step is metered
    _lock = threading.Lock()

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # Without shards of a module, which may be elsewhere until the backward.
        self._tensors = {name: t for name, t in tensors.items() if local_part(t) is t}
        self._then = {name: self._of(tensor) for name, tensor in self._tensors.items()}

    @classmethod
    def kept(cls, tensors: Mapping[str, Tensor]) -> Callable[[], str]:
        """Return a function that returns the name of a tensor with changed content, or ''."""
        return cls(tensors).changed

    @classmethod
    def kept_of_lent(cls, tensors: Mapping[str, Tensor]) -> Callable[[], str] | None:
        """Return the same for those whose memory something else than torch owns or has seen.

        It is numpy's, as in `torch.from_numpy(observation)`, which an environment writes anew.
        """
        lent = {n: t for n, t in tensors.items() if not t.untyped_storage().resizable()}
        return cls.kept(lent) if lent else None

    def changed(self) -> str:
        """Return the name of a tensor with changed content, or ''."""
        for name, tensor in self._tensors.items():
            before, now = self._then[name], self._of(tensor)
            if before is not None and now is not None and now != before:
                return name
        return ""

    def _of(self, tensor: Tensor) -> Any:
        with self._lock, straight_to_kernels():
            if tensor.untyped_storage().nbytes() == 0:  # freed until it is needed
                return None
            every = -(-tensor.numel() // _MOST)
            rows = tensor.detach()
            if every > 1 and rows.shape[0] >= every:
                rows = rows[::every]
            return self._fingerprints.of(rows)
