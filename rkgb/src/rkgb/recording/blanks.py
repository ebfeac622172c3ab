"""Memory in place of results that were not computed; it is filled when a running kernel reads it.

Most of it is only passed between kernels that do not run, and its pages are never touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rkgb.elements.tensor_info import storage_id

_NUMBER = 0.5  # valid for most kernels


class Blanks:
    """Makes such memory, and notes for each storage the type with which to fill it."""

    def __init__(self, types: dict[int, torch.dtype] | None = None) -> None:
        self._types = {} if types is None else types  # the owner removes freed storages

    def make(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Return fresh memory."""
        made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        self.empty(made)
        return made

    def empty(self, tensor: Tensor) -> None:
        """Note that the content of a tensor's memory does not matter."""
        self._types[storage_id(tensor)] = tensor.dtype

    def fill(self, tree: Any) -> None:
        """Fill the blank tensors among some arguments."""
        if not self._types:
            return
        if isinstance(tree, Tensor):
            self._fill(tree)
        elif isinstance(tree, (tuple, list)):
            for value in tree:
                self.fill(value)
        elif isinstance(tree, Mapping):
            for value in tree.values():
                self.fill(value)

    def _fill(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        dtype = self._types.pop(storage_id(tensor), None)
        if dtype is not None:
            with torch.no_grad():
                whole = torch.empty(0, dtype=dtype, device=tensor.device)
                whole.set_(tensor.untyped_storage()).fill_(_NUMBER)
