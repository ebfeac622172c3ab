"""Detects changes of tensors during a step that raise no version.

Plain PyTorch does not count edits through `.data`, numpy, dlpack or another process that shares the
memory. Its backward reads the present content. A recomputation would then compute other values than
the forward. Only a comparison of contents can detect this, and it takes time: a few microseconds
for a small tensor, whose bytes are kept on the host, and much more for the parameters of a model.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.torch_api import straight_to_kernels
from rockmate.comparison.fingerprint import Fingerprints
from rockmate.guards.sharded import local_part

_MOST = 1 << 20  # elements of a tensor that are compared: whole rows, evenly spread
SMALL_BYTES = 1 << 16  # of a tensor whose content is compared in every step


class Contents:
    """Fingerprints of tensors by name, and the tensors."""

    _fingerprints = Fingerprints()  # its memory is allocated before any step is metered
    _lock = threading.Lock()

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # Without shards of a module, which may be elsewhere until the backward.
        own = ((name, t) for name, t in tensors.items() if local_part(t) is t)
        self._tensors = {name: tensor for name, tensor in own if _has_bytes(tensor)}
        self._then = {name: self._of(tensor) for name, tensor in self._tensors.items()}

    @classmethod
    def kept(cls, tensors: Mapping[str, Tensor]) -> Callable[[], str]:
        """Return a function that returns the name of a tensor with changed content, or ''."""
        return cls(tensors).changed

    @classmethod
    def kept_of_few(cls, tensors: Mapping[str, Tensor]) -> Callable[[], str] | None:
        """Return such a function for small tensors, and for those whose versions say too little.

        These lie in memory that others write, too (numpy's: an environment writes
        `torch.from_numpy(observation)` anew), or have no version, as they were made in inference
        mode.
        """
        few = {n: t for n, t in tensors.items() if is_small(t) or not _has_telling_version(t)}
        return cls.kept(few) if few else None

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
            if is_small(tensor) and tensor.is_contiguous():
                return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
            every = -(-tensor.numel() // _MOST)
            rows = tensor.detach()
            if every > 1 and rows.shape[0] >= every:
                rows = rows[::every]
            return self._fingerprints.of(rows)


def is_small(tensor: Tensor) -> bool:
    """Return whether the content of a tensor can be compared in every step."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= SMALL_BYTES


def _has_bytes(tensor: Tensor) -> bool:
    """Return whether a tensor lies in memory as bytes: no sparse, nested, masked or meta one."""
    is_own = type(tensor).__torch_dispatch__ == Tensor.__torch_dispatch__
    return is_own and tensor.layout is torch.strided and not tensor.is_meta


def _has_telling_version(tensor: Tensor) -> bool:
    if tensor.is_inference():
        return False
    return tensor.layout is not torch.strided or tensor.untyped_storage().resizable()
