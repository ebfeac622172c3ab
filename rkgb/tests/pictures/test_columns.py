"""Pictures of deep networks: folded, broken into columns, and no taller than can be read."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

import rkgb
from rkgb.pictures import render
from rkgb.pictures.columns import SizedCell, arrange, columns_of, grid
from rkgb.pictures.fold import Folding, fold
from rkgb.pictures.render import dot_source, sketch_of
from rkgb.pictures.sketch import Sketch

needs_dot = pytest.mark.skipif(
    shutil.which("dot") is None, reason="the program dot (Graphviz) is not installed"
)


class Bottleneck(nn.Module):
    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample: nn.Module | None = None
        if stride > 1 or inner != 4 * width:
            shortcut = nn.Conv2d(inner, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return F.relu(y, inplace=True)


class ResNet50(nn.Module):
    """Its depth and its kinds of blocks, on few channels."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        inner = width
        for stage, depth in enumerate((3, 4, 6, 3)):
            blocks = []
            for block in range(depth):
                stride = 2 if stage and not block else 1
                blocks.append(Bottleneck(inner, width << stage, stride))
                inner = 4 * (width << stage)
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inner, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x)), inplace=True), 3, 2, 1)
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.fc(x.mean((2, 3)))


class UNet(nn.Module):
    """Four levels, with what the first half makes read in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(self.double(3 if i == 0 else 1 << i, 2 << i) for i in range(4))
        self.up = nn.ModuleList(self.double(6 << i, 2 << i) for i in reversed(range(3)))

    @staticmethod
    def double(inner: int, outer: int) -> nn.Module:
        convolutions = (nn.Conv2d(i, outer, 3, padding=1) for i in (inner, outer))
        return nn.Sequential(*(m for c in convolutions for m in (c, nn.BatchNorm2d(outer))))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, block in enumerate(self.down):
            x = torch.tanh(block(F.max_pool2d(x, 2) if level else x))
            kept.append(x)
        for level, block in zip((2, 1, 0), self.up, strict=True):
            x = torch.tanh(block(torch.cat([F.interpolate(x, scale_factor=2.0), kept[level]], 1)))
        return x


@pytest.fixture(scope="module")
def resnet() -> rkgb.RkgbResult:
    torch.manual_seed(0)
    return rkgb.make_all_graphs(ResNet50(), torch.randn(2, 3, 64, 64), cost="flops")


@pytest.fixture(scope="module")
def unet() -> rkgb.RkgbResult:
    torch.manual_seed(0)
    return rkgb.make_all_graphs(UNet(), torch.randn(2, 3, 32, 32), cost="flops")


def folding_of(sketch: Sketch) -> Folding:
    return fold([c.path for c in sketch.cells], [c.signature for c in sketch.cells])


def all_graphs(result: rkgb.RkgbResult) -> dict[str, Any]:
    graphs = {"D": result.D_graph, "S": result.S_graph, "K": result.K_graph}
    return {**graphs, "blocks": result, "K blocks": list(result.K_graph_list)}


def drawn(source: str) -> list[str]:
    """Return the forward boxes and blocks that a picture shows."""
    return re.findall(r"^\s+(\S+_fwd) \[label", source, re.MULTILINE)


@pytest.mark.parametrize("kind", ["D_graph", "S_graph", "K_graph"])
def test_every_node_of_a_resnet_is_represented_once(resnet: rkgb.RkgbResult, kind: str) -> None:
    sketch = sketch_of(getattr(resnet, kind))
    folding = folding_of(sketch)
    assert [repeat.count for repeat in folding.repeats] == [2, 3, 5, 2]
    labels = [repeat.label for repeat in folding.repeats]
    assert labels == [f"layer{i}.1 … layer{i}.{n}" for i, n in enumerate((2, 3, 5, 2), 1)]
    stands_for = Counter(place.shown for place in folding.places)
    for repeat in folding.repeats:
        assert {stands_for[cell] for cell in repeat.cells} == {repeat.count}
    assert sum(stands_for.values()) == len(sketch.cells)
    for cell, place in zip(sketch.cells, folding.places, strict=True):
        assert cell.signature == sketch.cells[place.shown].signature
    boxes = drawn(dot_source(getattr(resnet, kind)))
    assert sorted(boxes) == sorted(f"p0_{cell}_fwd" for cell in folding.shown)


def test_a_resnet_is_folded_stage_by_stage_or_drawn_out(resnet: rkgb.RkgbResult) -> None:
    nodes = len(resnet.S_graph.nodes)
    assert nodes > 100
    source = dot_source(resnet.S_graph)
    assert len(drawn(source)) < 66
    assert [source.count(f"<B>{n} ×</B>") for n in (2, 3, 5)] == [2, 1, 1]
    unfolded = dot_source(resnet.S_graph, folded=False)
    assert len(drawn(unfolded)) == nodes + 2  # the input and the result
    assert "×</B>" not in unfolded


def test_the_halves_of_a_u_net_stand_side_by_side(unet: rkgb.RkgbResult) -> None:
    sketch = sketch_of(unet.S_graph)
    (first, second), _ = columns_of(sketch, folding_of(sketch))
    paths = [{sketch.cells[c].path.split(".")[0] for c in column} for column in (first, second)]
    assert "up" not in paths[0]
    assert "down" not in paths[1]
    assert sorted(first + second) == list(range(len(sketch.cells)))
    source = dot_source(unet.S_graph)
    assert "cluster_p0_column1" in source
    assert "cluster_p0_column0" not in dot_source(unet.S_graph, columns=1)


def layout(source: str) -> list[list[str]]:
    found = subprocess.run(
        ["dot", "-Tplain"], input=source, capture_output=True, text=True, check=True
    )
    return [line.split() for line in found.stdout.splitlines()]


@needs_dot
@pytest.mark.parametrize("kind", ["D", "S", "K", "blocks", "K blocks"])
@pytest.mark.parametrize(("name", "most"), [("resnet", 2.0), ("unet", 5.0)])
def test_no_picture_is_a_ribbon(
    name: str, most: float, kind: str, request: pytest.FixtureRequest
) -> None:
    rows = layout(dot_source(all_graphs(request.getfixturevalue(name))[kind]))
    width, height = map(float, rows[0][2:4])
    assert width / 2 < height < most * width  # one column: 7 to 11 times its width


@needs_dot
@pytest.mark.parametrize("kind", ["S_graph_list", "K_graph_list"])
def test_every_class_keeps_its_box_in_the_grid(resnet: rkgb.RkgbResult, kind: str) -> None:
    source = dot_source(getattr(resnet, kind))
    drawing = subprocess.run(
        ["dot", "-Tsvg"], input=source.encode(), capture_output=True, check=True
    ).stdout.decode()
    classes = range(len(resnet.equivalent_classes))
    assert "chain of blocks" in drawing
    assert [n for n in classes if f">class {n}, " not in drawing.replace("&#160;", " ")] == []
    assert drawing.count('class="cluster"') > len(classes)


@needs_dot
@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_columns_stand_in_order_and_every_other_one_is_read_upwards(
    name: str, request: pytest.FixtureRequest
) -> None:
    graph = request.getfixturevalue(name).S_graph
    sketch = sketch_of(graph)
    columns, _ = columns_of(sketch, folding_of(sketch))
    assert len(columns) > 1
    at = {r[1]: (float(r[2]), float(r[3])) for r in layout(dot_source(graph)) if r[0] == "node"}
    right = 0.0
    for number, column in enumerate(columns):
        # Two inputs and results may hang over; what is inside counts.
        inner = [at[f"p0_{c}_fwd"] for c in column if sketch.cells[c].path]
        assert min(x for x, _ in inner) > right
        right = max(x for x, _ in inner)
        down = inner[0][1] > inner[-1][1]
        assert down == (number % 2 == 0)


def test_a_picture_that_dot_gives_up_is_drawn_in_one_column(
    unet: rkgb.RkgbResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = []

    def write(drawing: Any, name: str, *rest: Any) -> Path:
        sources.append(drawing.source)
        if "column1" in drawing.source:
            raise subprocess.CalledProcessError(-6, "dot")
        return tmp_path / name

    monkeypatch.setattr(render, "_write", write)
    assert rkgb.print_graph(unet.S_graph, "unet") == tmp_path / "unet"
    assert ["column1" in source for source in sources] == [True, False]


def test_an_impossible_number_of_columns_is_refused(unet: rkgb.RkgbResult) -> None:
    with pytest.raises(ValueError, match="0 columns were asked for; choose 1 or more"):
        dot_source(unet.S_graph, columns=0)


@st.composite
def rows_of_cells(draw: st.DrawFn) -> tuple[list[SizedCell], list[tuple[int, int]]]:
    count = draw(st.integers(1, 30))
    repeat = None
    pieces = []
    for cell in range(count):
        repeat = draw(st.sampled_from([repeat, None, cell]))
        height, width = draw(st.integers(1, 5)), draw(st.integers(1, 4))
        pieces.append(SizedCell(cell, float(width), float(height), (str(cell % 4),), repeat))
    arrows = [(cell, cell + 1) for cell in range(count - 1)]
    some = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    return pieces, arrows + [pair for pair in draw(st.lists(some, max_size=8)) if pair[0] < pair[1]]


@given(row=rows_of_cells(), count=st.integers(1, 6) | st.none())
def test_columns_hold_every_cell_once_and_tear_no_repeat(
    row: tuple[list[SizedCell], list[tuple[int, int]]], count: int | None
) -> None:
    pieces, arrows = row
    found = arrange(pieces, arrows, count)
    assert [cell for column in found.cells for cell in column] == list(range(len(pieces)))
    assert all(found.cells)
    assert len(found.cells) <= (count or 8)
    for column, following in zip(found.cells, found.cells[1:], strict=False):
        last, first = pieces[column[-1]], pieces[following[0]]
        assert last.repeat is None or last.repeat != first.repeat
    single = arrange(pieces, arrows, 1)
    assert len(single.cells) == 1
    if count is None:
        assert found.larger_by() <= single.larger_by()


@given(sizes=st.lists(st.tuples(st.floats(1, 20), st.floats(1, 20)), min_size=1, max_size=12))
def test_a_grid_holds_every_picture_once_and_the_chain_first(
    sizes: list[tuple[float, float]],
) -> None:
    order, across = grid(sizes)
    assert order[0] == 0
    assert sorted(order) == list(range(len(sizes)))
    assert 1 <= across <= len(sizes)
