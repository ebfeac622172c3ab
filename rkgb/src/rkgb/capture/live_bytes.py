"""Counts the bytes that operations hold, or would hold where tensors have no content."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rkgb.torch_api.torch_private import DispatchMode, pytree


class LiveBytes(DispatchMode):
    """While active, counts the memory of operations' results, on `meta` in place of a device.

    Results on the `device` itself count as well. Python numbers of tensors without content are 1.
    `now_bytes` are held at present above the `known` storages, and those that come as arguments;
    `peak_bytes` is their maximum.
    """

    is_over = False  # it counts no more, wherever it still is
    only_watches = True
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run compiled."""
        return True

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
        if self.is_over:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0 if args[0].is_floating_point() else 1
        for storage in self._storages((args, kwargs)):
            self._see(storage, 0)  # it was there before
        found = func(*args, **kwargs)
        self.see(found)
        return found

    def see(self, values: Any) -> None:
        """Count the tensors among some values, until they are gone."""
        for storage in self._storages(values):
            self._see(storage, self._block_bytes(storage.nbytes()))

    def _storages(self, values: Any) -> Iterator[Any]:
        for value in pytree.tree_leaves(values):
            is_counted = isinstance(value, Tensor) and value.layout is torch.strided
            if is_counted and value.device.type in self._places:
                yield value.untyped_storage()

    def _see(self, storage: Any, size_bytes: int) -> None:
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = size_bytes
        self.now_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now_bytes -= self._live.pop(key)
