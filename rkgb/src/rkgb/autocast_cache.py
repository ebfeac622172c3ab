"""Make the casts explicit that an autocast region shares between operations.

Autocast casts a parameter to low precision once per region and keeps the result: what reads the
parameter twice reads one cast, and the gradients are added in low precision before they are cast
back. Run one by one, each operation would cast for itself, and gradients would be added in full
precision: other bits. So a parameter that is cast more than once in one region gets an operation of
its own for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rkgb.errors import UnsupportedOpError
from rkgb.op import Op, Ref, map_refs

# Operations whose arguments autocast casts to the region's type.
LOW_PRECISION = frozenset(
    (
        *("linear", "matmul", "mm", "mv", "bmm", "addmm", "addmv", "addbmm", "baddbmm", "einsum"),
        *("conv1d", "conv2d", "conv3d", "conv_tbc", "convolution", "prelu", "chain_matmul"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linalg_multi_dot"),
        *("scaled_dot_product_attention", "linalg_vecdot"),
    )
)


@dataclass(frozen=True, slots=True)
class Scope:
    """The outermost autocast region that an operation is in; casts are kept until its end."""

    number: int
    cached: bool


def share_casts(
    ops: Sequence[Op], scopes: Sequence[Scope | None], parameters: Mapping[str, Tensor]
) -> tuple[Op, ...]:
    """Return the operations with one cast for each parameter that a region casts repeatedly.

    `scopes` has an entry per operation, `parameters` an entry per name of a value.
    """
    uses: dict[tuple[Scope, str, torch.dtype], list[int]] = {}
    for index, (op, scope) in enumerate(zip(ops, scopes, strict=True)):
        if scope is None or not scope.cached or op.autocast is None or not op.autocast.enabled:
            continue
        if op.target_name not in LOW_PRECISION:
            continue
        for name in dict.fromkeys(op.inputs):
            tensor = parameters.get(name)
            if tensor is not None and tensor.requires_grad and tensor.dtype == torch.float32:
                uses.setdefault((scope, name, op.autocast.dtype), []).append(index)
    before: dict[int, list[Op]] = {}
    renamed: dict[int, dict[str, str]] = {}
    for (scope, name, dtype), indices in uses.items():
        if len(indices) < 2:
            continue
        first = ops[indices[0]]
        if not all(ops[index].grad_enabled for index in indices):
            raise UnsupportedOpError(
                f"cannot place '{first.target_name}' ({first.module_path or 'root'}, "
                f"{first.source}): parameter '{name}' is used with and without gradient in one "
                "autocast region, which keeps one cast for both. End the region in between, or "
                "give it cache_enabled=False.",
                op=first.target_name,
                module_path=first.module_path,
                source=first.source,
            )
        cast = f"{name}_cast_{scope.number}_{str(dtype).removeprefix('torch.')}"
        before.setdefault(indices[0], []).append(
            replace(
                first,
                name=cast,
                target=torch.ops.aten.to.dtype,
                args=(Ref(name), dtype),
                kwargs={},
                autocast=None,
            )
        )
        for index in indices:
            renamed.setdefault(index, {})[name] = cast
    result: list[Op] = []
    for index, op in enumerate(ops):
        result += before.get(index, [])
        if index in renamed:
            op = _renamed(op, renamed[index])
        result.append(op)
    return tuple(result)


def _renamed(op: Op, table: Mapping[str, str]) -> Op:
    def current(name: str) -> Ref:
        return Ref(table.get(name, name))

    return replace(op, args=map_refs(op.args, current), kwargs=map_refs(dict(op.kwargs), current))
