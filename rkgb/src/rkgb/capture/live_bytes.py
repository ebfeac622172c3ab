"""Counts the bytes that operations on tensors without content would hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rkgb.torch_api.torch_private import DispatchMode, pytree


class LiveBytes(DispatchMode):
    """While active, counts the memory of operations' results, on `meta` in place of a device.

    Results on the `device` itself count as well. Python numbers of tensors without content are 1.
    `now_bytes` are held at present above the `known` storages; `peak_bytes` is their maximum.
    """

    def __init__(
        self,
        known: Iterable[Tensor],
        device: torch.device,
        block_bytes: Callable[[int], int] = int,
    ) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._block_bytes = block_bytes
        self._places = ("meta", device.type)
        self._live = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0 if args[0].is_floating_point() else 1
        found = func(*args, **kwargs)
        for value in pytree.tree_leaves(found):
            if isinstance(value, Tensor) and value.device.type in self._places:
                self._see(value.untyped_storage())
        return found

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = self._block_bytes(storage.nbytes())
        self.now_bytes += self._live[key]
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now_bytes -= self._live.pop(key)
