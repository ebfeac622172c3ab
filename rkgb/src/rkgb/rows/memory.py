"""Where results of pieces lie: over an input past its last use, or in the whole they belong to.

The gradient of a loss with respect to its logits is made in three steps. Each may write over what
the step before has made, and the first one into a whole that all pieces are gathered in:

    nll_loss_backward     grad_1 in its place in the whole
    _log_softmax_backward grad_2 over grad_1, and so in the whole
    mm                    reads grad_2 there

Where bits may differ, it is made out of the probabilities, over the logits themselves (losses.py).

A whole may also take the memory of a gradient that is cut in the same way, and that nobody else
reads: a piece of it is written where all of it has been read. Kernels and numbers are the same. The
parts of a gradient that leave the pieces lie in memory of their own. The backward of a convolution
that reads a `cat` makes one gradient, and slices of it go to the tensors that were joined. A slice
keeps all of that memory alive. Made in memory of its own, it is all that is left of it when the
others have been used:

    convolution_backward  grad [4, 16, 96, 96]
    slice                 [:, :8], for the skip connection: lives until the way down
    slice                 [:, 8:], for the upsampling: used at once
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rkgb.elements.op import Op
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.basic import BasicGraph
from rkgb.rows.cuts import Cuts
from rkgb.run.graph.overwrite import INTO_GRADIENT

_aten = torch.ops.aten


def _kernels(names: str, overload: str = "default", out: str = "out") -> dict[Any, Any]:
    packets = (getattr(_aten, name) for name in names.split())
    return {getattr(packet, overload): getattr(packet, out) for packet in packets}


# Kernels that each read an element, or a row, before they write it: over their first argument.
_OVER = {
    **_kernels("_log_softmax _softmax _log_softmax_backward_data _softmax_backward_data"),
    **_kernels("gelu silu tanh sigmoid relu exp neg"),
    **_kernels("add sub mul div", "Tensor"),
    **_kernels("scatter_add"),
    **INTO_GRADIENT,
}
_KERNELS: Mapping[Any, Any] = {
    **_OVER,
    **_kernels("mm addmm bmm baddbmm"),
    **_kernels("nll_loss_backward", out="grad_input"),
}


def into_memory(op: Op) -> tuple[Callable[..., Any], str]:
    """Return the kernel that writes into given memory, and the name of that argument."""
    kernel = _KERNELS[op.target]
    name = next(arg.name for arg in kernel._schema.arguments if arg.is_out)
    return getattr(kernel, "_op", kernel), name


def lying(
    loop: Sequence[Op],
    infos: Mapping[str, TensorInfo],
    gathered: Mapping[str, Cuts],
    summed: Sequence[str],
) -> dict[str, str]:
    """Return for results of the loop the input, or the whole, in whose memory they are made."""
    roots: dict[str, str] = {}
    for op in loop:
        for name in filter(None, op.results):
            roots[name] = roots.get(op.inputs[0], "") if is_view(op) else name
    last = {roots[name]: at for at, op in enumerate(loop) for name in op.inputs if name in roots}
    maker = {name: op for op in loop for name in op.results}
    homes = {name: name for name in gathered}  # value -> the whole that it is made in
    kept = {roots[name] for name in (*gathered, *summed) if name in roots}
    into: dict[str, str] = {}
    for at in range(len(loop) - 1, -1, -1):
        op = loop[at]
        name = op.results[0]
        if op.target not in _KERNELS or name in summed or name not in infos:
            continue
        home, first = homes.get(name, ""), op.inputs[0]
        others = {roots.get(other) for other in op.inputs[1:]}
        root = roots.get(first, "")
        is_past = bool(root) and last[root] == at and root not in kept | others
        if op.target in _OVER and is_past and _alike(infos, first, name):
            if home and first == root and maker[first].target in _KERNELS:
                homes[first], home = home, ""
            into[name] = home or first
        elif home:
            into[name] = home
    return into


def lent(
    loop: Sequence[Op],
    outside: Sequence[Op],
    infos: Mapping[str, TensorInfo],
    gathered: Mapping[str, Cuts],
    sources: Mapping[str, tuple[str, Cuts]],
) -> dict[str, tuple[str, ...]]:
    """Return for each gathered whole the values from outside in whose memory it may be made.

    `sources` are the pieces that the loop reads of them. All of a piece is read before, and nothing
    outside of the loop makes or reads that value.
    """
    cuts: dict[str, set[Cuts]] = {}
    reads: dict[str, int] = {}
    seen = {name for op in outside for name in (*op.inputs, *op.results)}
    for at, op in enumerate(loop):
        for name in op.inputs:
            source, cut = sources.get(name, (name, ()))
            cuts.setdefault(source, set()).add(cut)
            reads[source] = at
    maker = {name: at for at, op in enumerate(loop) for name in op.results}
    return {
        name: tuple(
            source
            for source, read in reads.items()
            if source not in maker
            and source not in seen
            and cuts[source] == {cut}
            and read <= maker[name]
            and _alike(infos, source, name)
        )
        for name, cut in gathered.items()
    }


def is_view(op: Op) -> bool:
    """Return whether a result may lie in the memory of an input."""
    schema = getattr(op.target, "_schema", None)
    return schema is None or any(made.alias_info for made in schema.returns)


def _alike(infos: Mapping[str, TensorInfo], name: str, other: str) -> bool:
    """Return whether two values fill memory of their own in the same way."""
    a, b = infos[name], infos[other]
    return (
        (a.shape, a.dtype, a.stride, a.offset) == (b.shape, b.dtype, b.stride, b.offset)
        and a.storage_bytes == b.storage_bytes == a.size_bytes == b.size_bytes
        and a.offset == 0
    )


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
            parts.update((name, in_own_memory(name, infos[name])) for name in own)
    return parts


def in_own_memory(name: str, info: TensorInfo) -> TensorInfo:
    """Return the facts about a copy, whose dimensions lie in the same order."""
    stride = [0] * len(info.shape)
    order = sorted(range(len(stride)), key=lambda dim: (-info.stride[dim], dim))
    for at, dim in enumerate(order):
        stride[dim] = math.prod(info.shape[d] for d in order[at + 1 :])
    own = replace(info, alias_of=name, stride=tuple(stride), offset=0)
    return replace(own, storage_bytes=info.size_bytes)
