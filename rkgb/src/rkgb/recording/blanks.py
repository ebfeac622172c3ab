"""Memory that stands for what was not computed: filled where a kernel that runs first reads it.

Most of it is only handed from one kernel that is not run to the next, and its pages are never
touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rkgb.elements.tensor_info import storage_id

_NUMBER = 0.5  # that most kernels take


class Blanks:
    """Makes such memory, and notes by the number of a storage what it is to hold."""

    def __init__(self, types: dict[int, torch.dtype] | None = None) -> None:
        self._types = {} if types is None else types  # whose owner forgets what is freed

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
        """Note that the memory of a tensor, which fills it, has no content that matters."""
        self._types[storage_id(tensor)] = tensor.dtype

    def fill(self, tree: Any) -> None:
        """Fill what is blank among the tensors of some arguments."""
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
