"""Add the gradient of a part to the gradient of the whole, without making the zeros around it.

The bits are those of the sum with zeros. Outside of the part, zeros are added too, because minus
zero plus zero is plus zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SELECTED = torch.ops.aten.select_backward.default  # puts zeros around a part


class AddSelected:
    """`whole += select_backward(part, sizes, dim, index)`."""

    __name__ = "add_selected_"

    def __repr__(self) -> str:  # the same in every process: a key of recorded costs
        return "rkgb.add_selected_"

    def __call__(
        self, whole: Tensor, part: Tensor, sizes: Sequence[int], dim: int, index: int
    ) -> Tensor:
        dim %= len(sizes)
        length, index = sizes[dim], index % sizes[dim]
        whole.select(dim, index).add_(part)
        for first, count in ((0, index), (index + 1, length - index - 1)):
            if count:
                whole.narrow(dim, first, count).add_(0.0)
        return whole


ADD_SELECTED = AddSelected()
