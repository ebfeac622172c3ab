"""The layout of values between compiled pieces: channels last for images of convolutions.

On a CPU inductor runs convolutions channels last. With recorded strides, each piece would copy its
input into that layout and its result back. So values that only compiled pieces make and read are
channels last from the start; all others keep their recorded layout. Some convolutions (1 x 1 on one
thread) run in kernels that want channels first. If the result of such a convolution keeps its
recorded layout, as at the end of a network, the values of its piece keep theirs too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from rkgb.elements.op import Op
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.torch_api.private.flags import convolves_in_onednn

_CONVOLUTIONS = frozenset(("convolution", "convolution_backward"))


def channels_last(sg: SimplifiedGraph, compiled: Collection[int]) -> dict[str, TensorInfo]:
    """Return facts about the values that are channels last between the `compiled` nodes of `sg`.

    These are plain images that only these nodes use and that a node with a convolution makes or
    reads. Besides them, their storages may contain only slices of their channels (parts of a
    `cat`).
    """
    if not _convolves_channels_last(sg.basic.device):
        return {}
    infos, basic = sg.infos, sg.basic
    outside = {*basic.externals, *filter(None, basic.tangent_names), *sg.output_names}
    outside |= {h.value for node in sg.nodes for h in node.hand_overs}
    fixed = {infos[name].alias_of for name in outside}
    with_convolution: set[str] = set()
    first: list[tuple[str, set[str]]] = []  # channels-first results, with their node's storages
    of_root: dict[str, list[str]] = {}
    for index, node in enumerate(sg.nodes):
        ops = (*node.ops, *node.backward)
        names = {name for op in ops for name in (*op.inputs, *op.results) if name}
        roots = {infos[name].alias_of for name in names}
        if index not in compiled:
            fixed |= roots
        convolutions = [op for op in ops if op.target_name in _CONVOLUTIONS]
        if convolutions:
            with_convolution |= roots
        for op in convolutions:
            if op in node.ops and not _is_for_onednn(op, infos):
                first.append((infos[op.name].alias_of, roots))
        for name in names:
            of_root.setdefault(infos[name].alias_of, []).append(name)
    for result, roots in first:
        fixed |= roots if result in fixed else set()
    laid: dict[str, TensorInfo] = {}
    for root, views in of_root.items():
        if root in with_convolution and root not in fixed:
            laid |= _laid(infos[root], {name: infos[name] for name in views})
    return laid


def laid_out(sg: SimplifiedGraph, infos: Mapping[str, TensorInfo]) -> SimplifiedGraph:
    """Return a graph with these facts about some of its values."""
    basic = sg.basic
    return sg.with_basic(replace(basic, infos={**basic.infos, **infos}))


def _convolves_channels_last(device: torch.device) -> bool:
    """Return whether inductor always does so; elsewhere it depends on sizes of the whole graph."""
    mkldnn = torch.backends.mkldnn
    return device.type == "cpu" and bool(mkldnn.enabled) and mkldnn.is_available()


def _is_for_onednn(op: Op, infos: Mapping[str, TensorInfo]) -> bool:
    image, weight = (
        torch.empty(infos[arg.name].shape, dtype=infos[arg.name].dtype, device="cpu")
        for arg in op.args[:2]
    )
    return convolves_in_onednn(image, weight, *op.args[3:])


def _laid(base: TensorInfo, views: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return channels-last facts about an image and slices of its channels; {} for others."""
    if len(base.shape) != 4 or not base.dtype.is_floating_point:
        return {}
    count, channels, rows, columns = base.shape
    size = rows * columns
    plain = (channels * size, size, columns, 1)
    if (base.stride, base.offset, base.storage_bytes) != (plain, 0, base.size_bytes):
        return {}
    stride = (channels * size, 1, columns * channels, channels)
    found = {}
    for name, info in views.items():
        whole = (count, *info.shape[1:2], rows, columns)
        if (info.shape, info.stride, info.dtype) != (whole, plain, base.dtype):
            return {}
        if info.offset % size or info.offset // size >= channels:
            return {}
        found[name] = replace(info, stride=stride, offset=info.offset // size)
    return found
