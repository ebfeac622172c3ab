"""Find the rule of an operation: one table for all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rkgb.rows import rules
from rkgb.rows.cuts import fit
from rkgb.rows.rules import Asked, Found, Rule, Value

_aten = torch.ops.aten


def find(asked: Asked) -> Found | None:
    """Return how an operation with a cut argument runs on pieces, or None if no rule applies.

    The answer is consistent: an argument that is cut is read as it is cut, and piece i of one
    argument belongs to piece i of every other.
    """
    target = asked.op.target
    rule = _RULES.get(target)
    if rule is None and torch.Tag.pointwise in getattr(target, "tags", ()):
        rule = rules.elementwise
    found = None if rule is None or asked.op.kwargs.keys() & {"out"} else rule(asked)
    if found is None:
        return None
    for place, value in enumerate(asked.args):
        if isinstance(value, Value):
            read = found.reads.get(place, (1,) * len(value.shape))
            if value.cuts is not None and value.cuts != read:
                return None
            if math.prod(read) == 1:
                continue
            if math.prod(read) != asked.count or not fit(value.shape, read, asked.runs):
                return None
    cut = (c for c in found.results if c is not None)
    return found if all(math.prod(c) == asked.count for c in cut) else None


_RULES: Mapping[Any, Rule] = {
    _aten._to_copy.default: rules.elementwise,
    _aten.clone.default: rules.elementwise,
    _aten.detach.default: rules.elementwise,
    _aten.alias.default: rules.elementwise,
    _aten.zeros_like.default: rules.elementwise,
    _aten.ones_like.default: rules.elementwise,
    _aten.view.default: rules.seen_as,
    _aten._unsafe_view.default: rules.seen_as,
    _aten.t.default: rules.permuted,
    _aten.transpose.int: rules.permuted,
    _aten.permute.default: rules.permuted,
    _aten.split.Tensor: rules.parted,
    _aten.split_with_sizes.default: rules.parted,
    _aten.cat.default: rules.joined,
    _aten.scatter_add.default: rules.scattered,
    _aten.select.int: rules.selected,
    _aten.unbind.int: rules.selected,
    _aten.unsqueeze.default: rules.unsqueezed(1),
    _aten.squeeze.dim: rules.squeezed,
    _aten.expand.default: rules.with_size(rules.expanded, 1),
    _aten.slice.Tensor: rules.sliced,
    _aten.slice_backward.default: rules.with_size(rules.sliced_backward, 1),
    _aten.select_backward.default: rules.with_size(rules.unsqueezed(2), 1),
    _aten.mm.default: rules.product,
    _aten.bmm.default: rules.product,
    _aten.addmm.default: rules.product_and_sum,
    _aten.baddbmm.default: rules.product_and_sum,
    _aten.sum.default: rules.summed,
    _aten.sum.dim_IntList: rules.summed,
    _aten.mean.default: rules.averaged,
    _aten.mean.dim: rules.averaged,
    _aten._softmax.default: rules.over(1),
    _aten._log_softmax.default: rules.over(1),
    _aten._softmax_backward_data.default: rules.over(2),
    _aten._log_softmax_backward_data.default: rules.over(2),
    _aten.native_layer_norm.default: rules.normed,
    _aten._fused_rms_norm.default: rules.normed,
    _aten.native_layer_norm_backward.default: rules.normed_backward,
    _aten._fused_rms_norm_backward.default: rules.normed_backward,
    _aten.native_group_norm.default: rules.with_size(rules.samples((0,), "rrr"), 3),
    _aten.native_group_norm_backward.default: rules.with_size(
        rules.samples((0, 1, 2, 3), "rss"), 5
    ),
    _aten.embedding.default: rules.looked_up,
    _aten.embedding_dense_backward.default: rules.looked_up_backward,
    _aten.convolution.default: rules.samples((0,), "r"),
    _aten.convolution_backward.default: rules.samples((0, 1), "rss"),
    _aten.max_pool2d_with_indices.default: rules.samples((0,), "rr"),
    _aten.max_pool2d_with_indices_backward.default: rules.samples((0, 1, 7), "r"),
    _aten.avg_pool2d.default: rules.samples((0,), "r"),
    _aten.avg_pool2d_backward.default: rules.samples((0, 1), "r"),
    _aten._adaptive_avg_pool2d.default: rules.samples((0,), "r"),
    _aten._adaptive_avg_pool2d_backward.default: rules.samples((0, 1), "r"),
    _aten.upsample_nearest2d.vec: rules.samples((0,), "r"),
    _aten.upsample_nearest2d.default: rules.samples((0,), "r"),
    _aten.upsample_nearest2d_backward.default: rules.with_size(rules.samples((0,), "r"), 2),
    _aten.upsample_bilinear2d.vec: rules.samples((0,), "r"),
    _aten.upsample_bilinear2d.default: rules.samples((0,), "r"),
    _aten.upsample_bilinear2d_backward.default: rules.with_size(rules.samples((0,), "r"), 2),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: rules.samples(
        (0, 1, 2), "rr", dims=2
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: rules.samples(
        (0, 1, 2, 3, 4, 5), "rrr", dims=2
    ),
    _aten.nll_loss_forward.default: rules.loss,
    _aten.nll_loss_backward.default: rules.loss_backward,
}
