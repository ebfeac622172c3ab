"""How values between compiled pieces lie in memory: images channels last, where convolutions do.

On a CPU inductor runs convolutions channels last. Where pieces keep to what was recorded, each
copies its input into that order and its result back again. So what only compiled pieces read and
make lies channels last from the start; all else lies as recorded. The kernels that oneDNN leaves
some convolutions to (1 x 1 on one thread) want channels first: where what they make lies as
recorded anyway, as at the end of a network, so does what their piece reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from rkgb.elements.op import Op
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.torch_api.torch_private import convolves_in_onednn

_CONVOLUTIONS = frozenset(("convolution", "convolution_backward"))


def channels_last(sg: SimplifiedGraph, compiled: Collection[int]) -> dict[str, TensorInfo]:
    """Return facts about the values that lie channels last between the `compiled` nodes of `sg`.

    Values are named that are plain images, that nobody outside these nodes has or sees, and that a
    node with a convolution makes or reads. They share their storage with parts of their channels
    (what was put together with `cat` is taken apart so) and with nothing else.
    """
    if not _convolves_channels_last(sg.dataflow.basic.device):
        return {}
    infos, basic = sg.dataflow.infos, sg.dataflow.basic
    outside = {*basic.externals, *filter(None, basic.tangent_names), *sg.output_names}
    outside |= {h.value for node in sg.nodes for h in node.hand_overs}
    fixed = {infos[name].alias_of for name in outside}
    with_convolution: set[str] = set()
    first: list[tuple[str, set[str]]] = []  # results that are made channels first, and all beside
    of_root: dict[str, list[str]] = {}
    for index, node in enumerate(sg.nodes):
        ops = (*node.ops, *node.backward)
        names = {name for op in ops for name in _mentioned(op)}
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
    """Return a graph with other facts about some of its values."""
    dataflow = sg.dataflow
    basic = replace(dataflow.basic, infos={**dataflow.infos, **infos})
    return replace(sg, dataflow=replace(dataflow, basic=basic))


def _convolves_channels_last(device: torch.device) -> bool:
    """Whether inductor always does so: elsewhere it depends on the sizes of a whole graph."""
    mkldnn = torch.backends.mkldnn
    return device.type == "cpu" and bool(mkldnn.enabled) and mkldnn.is_available()


def _is_for_onednn(op: Op, infos: Mapping[str, TensorInfo]) -> bool:
    image, weight = (
        torch.empty(infos[arg.name].shape, dtype=infos[arg.name].dtype) for arg in op.args[:2]
    )
    return convolves_in_onednn(image, weight, *op.args[3:])


def _mentioned(op: Op) -> tuple[str, ...]:
    return (*op.inputs, *filter(None, op.results))


def _laid(base: TensorInfo, views: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return facts about an image and parts of its channels, or nothing if they are others."""
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
