"""Sums that keep the dimensions they sum over, only for a view to drop them.

Autograd sums the gradient of a bias with `keepdim=True`, then takes a view without these
dimensions. The same kernel can return that view directly: torch makes the result with the
dimensions and removes them at the end, with the same strides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from rkgb.elements.op import Op
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.basic import BasicGraph
from rkgb.graphs.simplified import SimplifiedNode, backward_uses

_SUM = torch.ops.aten.sum.dim_IntList


def without_kept_dims(
    nodes: Sequence[SimplifiedNode], basic: BasicGraph
) -> tuple[list[SimplifiedNode], BasicGraph]:
    """Return the nodes with sums that drop dimensions directly, and the updated recording."""
    infos = basic.infos
    now: dict[str, str] = {}  # storage of a removed sum -> its replacement
    readers = backward_uses(nodes, infos).readers
    changed = []
    for node in nodes:
        sums = {op.results[0]: op for op in node.backward if op.target is _SUM}
        views = {
            base: op
            for op in node.backward
            if (base := op.inputs[0] if op.inputs else "") in sums
            and len(readers[base]) == 1
            and _drops_dims(sums[base], op, infos)
        }
        gone = {op.name for op in views.values()}
        backward = []
        for op in node.backward:
            if op.target is _SUM and (view := views.get(op.results[0])) is not None:
                now[op.results[0]] = view.results[0]
                op = replace(op, args=op.args[:2], results=view.results)
            if op.name not in gone:
                backward.append(op)
        changed.append(replace(node, backward=tuple(backward)))
    changed_infos = {
        name: replace(info, alias_of=now[info.alias_of])
        if info.alias_of in now and name not in now
        else info
        for name, info in infos.items()
    }
    return changed, replace(basic, infos=changed_infos)


def _drops_dims(sum_: Op, view: Op, infos: Mapping[str, TensorInfo]) -> bool:
    """Return whether a view of a sum is all of it, without the summed dimensions."""
    if len(sum_.args) < 3 or sum_.args[2] is not True or len(view.results) != 1 or view.writes:
        return False
    kept, seen = infos[sum_.results[0]], infos[view.results[0]]
    if not sum_.args[1] or not kept.shape:  # no dimensions: a sum over all
        return False
    summed = {dim % len(kept.shape) for dim in sum_.args[1]}
    left = [dim for dim in range(len(kept.shape)) if dim not in summed]
    return (
        kept.alias_of == sum_.results[0] == seen.alias_of
        and seen.dtype == kept.dtype
        and seen.offset == kept.offset
        and seen.shape == tuple(kept.shape[dim] for dim in left)
        and seen.stride == tuple(kept.stride[dim] for dim in left)
    )
