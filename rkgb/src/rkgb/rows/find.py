"""Find the rule of an operation: one table for all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rkgb.rows.layer_rules import (
    looked_up,
    looked_up_backward,
    loss,
    loss_backward,
    normed,
    normed_backward,
    samples,
)
from rkgb.rows.rules import (
    Asked,
    Found,
    Rule,
    Value,
    averaged,
    elementwise,
    expanded,
    joined,
    over,
    parted,
    permuted,
    product,
    product_and_sum,
    seen_as,
    selected,
    selected_backward,
    sliced,
    sliced_backward,
    squeezed,
    summed,
    unsqueezed,
    with_size,
)

_aten = torch.ops.aten


def find(asked: Asked) -> Found | None:
    """Return how an operation with a cut argument runs on pieces, or None if no rule applies.

    The answer is consistent: an argument that is cut is read as it is cut, and piece i of one
    argument belongs to piece i of every other.
    """
    target = asked.op.target
    rule = _RULES.get(target)
    if rule is None and torch.Tag.pointwise in getattr(target, "tags", ()):
        rule = elementwise
    found = None if rule is None or asked.op.kwargs.keys() & {"out"} else rule(asked)
    if found is None:
        return None
    for place, value in enumerate(asked.args):
        if isinstance(value, Value):
            read = found.reads.get(place, (1,) * len(value.shape))
            if value.cuts is not None and value.cuts != read:
                return None
            if math.prod(read) not in (1, asked.count) or any(map(_remains, value.shape, read)):
                return None
    cut = (c for c in found.results if c is not None)
    return found if all(math.prod(c) == asked.count for c in cut) else None


def _remains(size: int, parts: int) -> int:
    return size % parts


_RULES: Mapping[Any, Rule] = {
    _aten._to_copy.default: elementwise,
    _aten.clone.default: elementwise,
    _aten.detach.default: elementwise,
    _aten.alias.default: elementwise,
    _aten.zeros_like.default: elementwise,
    _aten.ones_like.default: elementwise,
    _aten.view.default: seen_as,
    _aten._unsafe_view.default: seen_as,
    _aten.t.default: permuted,
    _aten.transpose.int: permuted,
    _aten.permute.default: permuted,
    _aten.split.Tensor: parted,
    _aten.split_with_sizes.default: parted,
    _aten.cat.default: joined,
    _aten.select.int: selected,
    _aten.unbind.int: selected,
    _aten.unsqueeze.default: unsqueezed,
    _aten.squeeze.dim: squeezed,
    _aten.expand.default: with_size(expanded, 1),
    _aten.slice.Tensor: sliced,
    _aten.slice_backward.default: with_size(sliced_backward, 1),
    _aten.select_backward.default: with_size(selected_backward, 1),
    _aten.mm.default: product,
    _aten.bmm.default: product,
    _aten.addmm.default: product_and_sum,
    _aten.baddbmm.default: product_and_sum,
    _aten.sum.default: summed,
    _aten.sum.dim_IntList: summed,
    _aten.mean.default: averaged,
    _aten.mean.dim: averaged,
    _aten._softmax.default: over(1),
    _aten._log_softmax.default: over(1),
    _aten._softmax_backward_data.default: over(2),
    _aten._log_softmax_backward_data.default: over(2),
    _aten.native_layer_norm.default: normed,
    _aten._fused_rms_norm.default: normed,
    _aten.native_layer_norm_backward.default: normed_backward,
    _aten._fused_rms_norm_backward.default: normed_backward,
    _aten.native_group_norm.default: with_size(samples((0,), "rrr"), 3),
    _aten.native_group_norm_backward.default: with_size(samples((0, 1, 2, 3), "rss"), 5),
    _aten.embedding.default: looked_up,
    _aten.embedding_dense_backward.default: looked_up_backward,
    _aten.convolution.default: samples((0,), "r"),
    _aten.convolution_backward.default: samples((0, 1), "rss"),
    _aten.max_pool2d_with_indices.default: samples((0,), "rr"),
    _aten.max_pool2d_with_indices_backward.default: samples((0, 1, 7), "r"),
    _aten.avg_pool2d.default: samples((0,), "r"),
    _aten.avg_pool2d_backward.default: samples((0, 1), "r"),
    _aten._adaptive_avg_pool2d.default: samples((0,), "r"),
    _aten._adaptive_avg_pool2d_backward.default: samples((0, 1), "r"),
    _aten.upsample_nearest2d.vec: samples((0,), "r"),
    _aten.upsample_nearest2d.default: samples((0,), "r"),
    _aten.upsample_nearest2d_backward.default: with_size(samples((0,), "r"), 2),
    _aten.upsample_bilinear2d.vec: samples((0,), "r"),
    _aten.upsample_bilinear2d.default: samples((0,), "r"),
    _aten.upsample_bilinear2d_backward.default: with_size(samples((0,), "r"), 2),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: samples((0, 1, 2), "rr", dims=2),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: samples(
        (0, 1, 2, 3, 4, 5), "rrr", dims=2
    ),
    _aten.nll_loss_forward.default: loss,
    _aten.nll_loss_backward.default: loss_backward,
}
