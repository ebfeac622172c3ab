"""Add the gradient of a part to the gradient of the whole, without making the zeros around it.

The bits are those of the sum with zeros. Outside of the part, zeros are added too, because minus
zero plus zero is plus zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


class PartSum:
    """`whole += backward(part, ...)`, for a backward that puts zeros around a part."""

    def __init__(self, name: str, borders: Callable[..., tuple[int, int, int]]) -> None:
        self.__name__ = name
        self._borders = borders  # dimension, begin, end

    def __repr__(self) -> str:  # the same in every process: a key of recorded costs
        return f"rkgb.{self.__name__}"

    def __call__(self, whole: Tensor, part: Tensor, sizes: Sequence[int], *place: int) -> Tensor:
        dim, begin, end = self._borders(sizes, *place)
        length = sizes[dim]
        inside = whole.narrow(dim, begin, end - begin)
        inside.add_(part if part.dim() == whole.dim() else part.unsqueeze(dim))
        for first, count in ((0, begin), (end, length - end)):
            if count:
                whole.narrow(dim, first, count).add_(0.0)
        return whole


def _selected(sizes: Sequence[int], dim: int, index: int) -> tuple[int, int, int]:
    dim %= len(sizes)
    index %= sizes[dim]
    return dim, index, index + 1


PART_SUMS: Mapping[Any, PartSum] = {
    _aten.select_backward.default: PartSum("add_selected_", _selected),
}
