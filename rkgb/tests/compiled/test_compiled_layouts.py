"""How values lie in memory between compiled pieces: images channels last, all else as recorded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rkgb.compiled.code.known as knowing
import rkgb.compiled.rewrite as rewriting
from rkgb.capture import make_B
from rkgb.compiled.code.classes import NotCompiledError
from rkgb.compiled.code.compiling import compile_code
from rkgb.compiled.code.known import KnownClasses
from rkgb.compiled.pieces.grouping import refusal, runs_of
from rkgb.compiled.pieces.joint import joint_of
from rkgb.compiled.pieces.layouts import channels_last, laid_out
from rkgb.engine import B_to_D, D_to_S
from rkgb.graphs import PLANNED_PASSES, SimplifiedGraph
from rkgb.graphs.dataflow import DataFlowGraph
from rkgb.graphs.simplified import merging

CPU = torch.device("cpu")
needs_mkldnn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),
    reason="inductor convolves channels last with mkldnn only",
)


class Skip(nn.Module):
    """Convolutions on two resolutions, joined by a skip connection."""

    def __init__(self, window: int = 2) -> None:
        super().__init__()
        self.first, self.deep = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(8, 4, 3, padding=1)
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        first = functional.relu(self.first(x))
        padding = self.window // 2 - (self.window == 2)
        down = functional.max_pool2d(first, self.window, 2, padding)
        up = self.up(torch.tanh(self.deep(down)))
        return self.last(torch.cat([first, up], 1)).mean((2, 3))


def dataflow_of(model: nn.Module) -> DataFlowGraph:
    torch.manual_seed(0)
    return B_to_D(make_B(model, torch.randn(2, 3, 8, 8)))


def grouped(model: nn.Module) -> tuple[SimplifiedGraph, set[int]]:
    """Return the graph of pieces, and which of its nodes would be compiled."""
    dataflow = dataflow_of(model)
    plain = D_to_S(dataflow, passes=PLANNED_PASSES)
    but = [i for i, node in enumerate(plain.nodes) if refusal(node, plain)]
    runs = runs_of(plain, but)
    sg = D_to_S(dataflow, passes=(*PLANNED_PASSES, merging(plain, runs)))
    starts = {plain.nodes[run[0]].positions[0] for run in runs}
    return sg, {i for i, node in enumerate(sg.nodes) if starts & {*node.positions}}


@needs_mkldnn
def test_images_between_compiled_pieces_lie_channels_last() -> None:
    sg, compiled = grouped(Skip())
    laid = channels_last(sg, compiled)
    assert laid
    for name, info in laid.items():
        old, base = sg.infos[name], sg.infos[info.alias_of]
        like = torch.empty(base.shape).contiguous(memory_format=torch.channels_last)
        channel = old.offset // old.shape[2] // old.shape[3]
        part = like[:, channel : channel + old.shape[1]]
        assert (info.stride, info.offset) == (like.stride(), part.storage_offset())
        assert info.storage_bytes == 4 * like.numel()
        assert old.stride == torch.empty(base.shape).stride()
    convolutions = {op.name for node in sg.nodes for op in node.ops if op.target_name == "relu"}
    assert convolutions <= set(laid)
    assert any(info.offset for info in laid.values())  # a part of what `cat` has put together
    outside = {*sg.basic.externals, *sg.output_names}
    outside |= {h.value for node in sg.nodes for h in node.hand_overs}
    assert not outside & set(laid)


@needs_mkldnn
def test_what_an_eager_node_reads_or_makes_lies_as_recorded() -> None:
    sg, compiled = grouped(Skip())
    (eager,) = (i for i in compiled if any(op.target_name == "tanh" for op in sg.nodes[i].ops))
    laid = set(channels_last(sg, compiled - {eager}))
    assert laid
    node = sg.nodes[eager]
    assert not laid & {name for op in (*node.ops, *node.backward) for name in op.inputs}
    assert not laid & {name for op in (*node.ops, *node.backward) for name in op.results}


def test_without_convolutions_nothing_lies_otherwise() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.into(x)))

    sg, compiled = grouped(Scaled())
    assert compiled
    assert not channels_last(sg, compiled)


def test_large_windows_and_those_with_gaps_stay_eager() -> None:
    class Pools(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            small = functional.max_pool2d(x * 2, 3, 1, 1)
            large = functional.max_pool2d(x, 6, 1, 3)[..., :8, :8]
            gaps = functional.max_pool2d(x, 3, 1, 1, dilation=2)
            return (
                small
                + large
                + functional.pad(gaps, (1, 1, 1, 1))
                + functional.avg_pool2d(x, 3, 1, 1)
            )

    dataflow = B_to_D(make_B(Pools(), torch.randn(1, 2, 8, 8, requires_grad=True)))
    plain = D_to_S(dataflow, passes=PLANNED_PASSES)
    why = [refusal(node, plain) for node in plain.nodes if "pool" in node.name]
    assert (
        sorted(why)[2:]
        == ["max_pool2d_with_indices takes windows of more than 25 elements, or with gaps"] * 2
    )
    assert sorted(why)[:2] == ["", ""]


@pytest.mark.nightly
@needs_mkldnn
@pytest.mark.parametrize("window", [2, 3])
def test_pieces_take_and_make_images_channels_last(window: int) -> None:
    sg, compiled = grouped(Skip(window))
    sg = laid_out(sg, channels_last(sg, compiled))
    last = 0
    for index in sorted(compiled):
        joint = joint_of(sg, index)
        code = compile_code(joint, CPU).class_of(joint, CPU, None)
        torch.manual_seed(index)
        primals, tangents = (
            [
                torch.empty_strided(joint.infos[n].shape, joint.infos[n].stride).uniform_()
                for n in row
            ]
            for row in (joint.primals, joint.tangents)
        )
        with torch.no_grad():
            results = list(code.forward(*(primals[place] for place in code.takes)))
            known = {"primal": primals, "tangent": tangents, "result": results}
            made = list(code.backward(*(known[kind][at] for kind, at in code.takes_back)))
            expected = joint.run(primals, tangents)
        names = (*joint.results, *joint.gradients)
        ours = [*results[: len(joint.results)], *made]
        for name, value, wanted in zip(names, ours, expected, strict=True):
            torch.testing.assert_close(value, wanted)
            assert value.stride() == joint.infos[name].stride
            last += value.dim() == 4 and value.stride()[1] == 1 and value.shape[1] > 1
    assert last >= 6


def test_a_piece_that_fails_channels_last_is_tried_as_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[bool] = []

    def fails(joint: object, *_: object) -> None:
        tried.append(True)
        raise NotCompiledError("not here")

    monkeypatch.setattr(knowing, "compile_code", fails)
    monkeypatch.setattr(rewriting, "_known", KnownClasses())
    dataflow = dataflow_of(Skip())
    compiled = rewriting.compile_pieces(dataflow)
    assert not compiled.count
    infos = compiled.graph.infos
    assert all(infos[name].stride == info.stride for name, info in dataflow.infos.items())
    assert len(tried) > len(compiled.graph.nodes) // 2


def test_few_classes_of_many_pixels_stay_eager() -> None:
    class Ends(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            many = torch.arange(16 * 9).reshape(2, 8, 9) % 9
            few = functional.cross_entropy(x, many % 2)
            return few + functional.cross_entropy(y, many) + functional.softmax(x[0, :, 0], 1).sum()

    pixels = torch.randn(2, 2, 8, 9, requires_grad=True), torch.randn(2, 9, 8, 9).requires_grad_()
    plain = D_to_S(B_to_D(make_B(Ends(), pixels)), passes=PLANNED_PASSES)
    refused = [n.main.target_name for n in plain.nodes if "classes" in refusal(n, plain)]
    named = [n.main.target_name for n in plain.nodes]
    assert refused == ["_log_softmax", "nll_loss2d_forward"]
    assert named.count("_log_softmax") == 2
    assert "_softmax" in named  # over the innermost axis


@needs_mkldnn
def test_what_reads_for_a_last_convolution_of_one_by_one_lies_as_recorded() -> None:
    class Head(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.body, self.head = (
                nn.Conv2d(3, 4, 3, padding=1),
                nn.Conv2d(4, 2, size, padding=size // 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.body(x)))

    def laid(size: int) -> bool:
        sg, compiled = grouped(Head(size))
        return bool(channels_last(sg, compiled))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert [laid(1), laid(3)] == [False, True]
    finally:
        torch.set_num_threads(threads)
