"""Parts of a gradient that leave the pieces, in memory of their own.

The backward of a convolution that reads a `cat` makes one gradient, and slices of it go to the
tensors that were joined. A slice keeps all of that memory alive. Made in memory of its own, it is
all that is left of it when the others have been used:

    convolution_backward  grad [4, 16, 96, 96]
    slice                 [:, :8], for the skip connection: lives until the way down
    slice                 [:, 8:], for the upsampling: used at once
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from rkgb.elements.op import Op
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.basic import BasicGraph

_SLICE = torch.ops.aten.slice.Tensor


def parts_that_leave(
    leaving: Sequence[str], ops: Sequence[Op], basic: BasicGraph
) -> dict[str, TensorInfo]:
    """Return slices among the values that leave some operations, as values in own memory.

    Nothing else may read or write the memory that they lie in by now.
    """
    infos = basic.infos
    maker = {name: op for op in ops for name in op.results if name}
    written = {infos[n].alias_of for op in (*basic.ops, *basic.backward) for n in op.writes}
    parts: dict[str, TensorInfo] = {}
    for root in dict.fromkeys(infos[name].alias_of for name in leaving):
        own = [name for name in dict.fromkeys(leaving) if infos[name].alias_of == root]
        seen = {name for name, info in infos.items() if info.alias_of == root}
        size_bytes = sum(infos[name].size_bytes for name in own)
        if (
            all(maker[name].target is _SLICE for name in own)
            and seen <= maker.keys()
            and root not in written | {*basic.written_roots}
            and size_bytes <= infos[root].size_bytes
        ):
            parts.update((name, _in_own_memory(name, infos[name])) for name in own)
    return parts


def _in_own_memory(name: str, info: TensorInfo) -> TensorInfo:
    """Return the facts about a copy, whose dimensions lie in the same order."""
    stride = [0] * len(info.shape)
    order = sorted(range(len(stride)), key=lambda dim: (-info.stride[dim], dim))
    for at, dim in enumerate(order):
        stride[dim] = math.prod(info.shape[d] for d in order[at + 1 :])
    own = replace(info, alias_of=name, stride=tuple(stride), offset=0)
    return replace(own, storage_bytes=info.size_bytes)
