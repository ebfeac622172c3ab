"""What tensors held when a step began, where no version tells that they have changed since.

Plain PyTorch counts no edits through `.data`, numpy, dlpack or another process that shares the
memory. Its own backward reads what lies there by then; what runs again in a planned one would
compute other values than the forward kept. Only the content can tell, and reading it takes time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rkgb.torch_api import straight_to_kernels
from rockmate.comparison.fingerprint import Fingerprints
from rockmate.keys.sharded import local_part

_MOST = 1 << 20  # elements that are looked at of a tensor: whole rows of it, evenly spread


class Contents:
    """Fingerprints of tensors by name, and the tensors."""

    _fingerprints = Fingerprints()  # in memory that is taken before any step is metered
    _lock = threading.Lock()

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # Not those of a module's shards: they may be elsewhere until the backward.
        self._tensors = {name: t for name, t in tensors.items() if local_part(t) is t}
        self._then = {name: self._of(tensor) for name, tensor in self._tensors.items()}

    @classmethod
    def kept(cls, tensors: Mapping[str, Tensor]) -> Callable[[], str]:
        """Return what names one of the tensors that holds something else by then, or returns ''."""
        return cls(tensors).changed

    def changed(self) -> str:
        """Return the name of a tensor that holds something else now, or ''."""
        for name, tensor in self._tensors.items():
            before, now = self._then[name], self._of(tensor)
            if before is not None and now is not None and now != before:
                return name
        return ""

    def _of(self, tensor: Tensor) -> Any:
        with self._lock, straight_to_kernels():
            if tensor.untyped_storage().nbytes() == 0:  # let go of until it is needed
                return None
            every = -(-tensor.numel() // _MOST)
            rows = tensor.detach()
            if every > 1 and rows.shape[0] >= every:
                rows = rows[::every]
            return self._fingerprints.of(rows)
