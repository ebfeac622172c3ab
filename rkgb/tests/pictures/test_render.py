"""Pictures: what is in them, that layers are folded, and what happens without the program `dot`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rkgb
from rkgb.pictures.fold import fold
from rkgb.pictures.render import dot_source, print_once, sketch_of
from zoo.examples import example

needs_dot = pytest.mark.skipif(
    shutil.which("dot") is None, reason="the program dot (Graphviz) is not installed"
)


def result_of(model: nn.Module, sample: object) -> rkgb.RkgbResult:
    return rkgb.make_all_graphs(model, sample, cost="flops")


@pytest.fixture(scope="module")
def result() -> rkgb.RkgbResult:
    torch.manual_seed(0)
    return result_of(Stack(layers=4), torch.randn(3, 8))


class Stack(nn.Module):
    """Equal layers in a list, after one that differs."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(0.1), nn.GELU())
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def drawn_boxes(source: str) -> int:
    return len(re.findall(r"^\s+\S+_(?:fwd|bwd) \[label", source, re.MULTILINE))


@pytest.mark.parametrize("kind", ["D_graph", "S_graph", "K_graph", "S_graph_list", "K_graph_list"])
def test_every_graph_is_described_with_a_legend(result: rkgb.RkgbResult, kind: str) -> None:
    source = dot_source(getattr(result, kind))
    assert "addmm" in source
    assert "forward; darker" in source
    assert "4 ×" in source


def test_equal_layers_are_drawn_once(result: rkgb.RkgbResult) -> None:
    many = result_of(Stack(layers=9), torch.randn(3, 8))
    for kind in ("S_graph", "K_graph", "D_graph"):
        few_boxes = drawn_boxes(dot_source(getattr(result, kind)))
        assert drawn_boxes(dot_source(getattr(many, kind))) == few_boxes
    source = dot_source(many.S_graph)
    assert "9 ×" in source
    assert "layers.0 … layers.8" in source


def test_forward_backward_gradients_and_phantoms_are_told_apart(result: rkgb.RkgbResult) -> None:
    source = dot_source(result.K_graph)
    kinds = {v.kind for cell in sketch_of(result.K_graph).cells for v in cell.vertices.values()}
    assert kinds == {"fwd", "bwd", "data", "grad", "phantom"}
    for word in ("forward;", "backward;", "phantom:", "gradient of a value", "dashed"):
        assert word in source


def test_blocks_of_one_class_have_one_colour(result: rkgb.RkgbResult) -> None:
    sketch = sketch_of(result)
    colours = [cell.vertices["fwd"].colour_class for cell in sketch.cells]
    expected = [0] * len(colours)
    for number, members in enumerate(result.equivalent_classes):
        for index in members:
            expected[index] = number
    assert colours == expected
    assert len(sketch.parts) == len(result.equivalent_classes)


def test_nodes_are_grouped_by_module(result: rkgb.RkgbResult) -> None:
    source = dot_source(result.S_graph)
    assert re.search(r"subgraph \"?cluster_\S*layers\.0\"? {", source)


@pytest.mark.parametrize("name", ["convolutional", "mixed", "recurrent", "averaging"])
def test_no_node_of_an_unfolded_graph_is_lost(name: str) -> None:
    model, sample = example(name)
    result = result_of(model, sample)
    shown = sketch_of(result.S_graph)
    compute = [c for c in shown.cells if c.vertices["fwd"].kind == "fwd"]
    assert len(compute) == len(result.S_graph.nodes)


@needs_dot
@pytest.mark.parametrize("render_format", ["svg", "pdf", "png"])
def test_pictures_are_written(result: rkgb.RkgbResult, tmp_path: Path, render_format: str) -> None:
    paths = rkgb.print_all_graphs(
        result, name="stack", render_format=render_format, folder=tmp_path
    )
    assert {p.name for p in paths} == {
        f"stack_{kind}.{render_format}" for kind in ("D_graph", "S_graph", "K_graph", "blocks")
    }
    assert all(path.stat().st_size > 1000 for path in paths)
    assert not list(tmp_path.glob("*.gv"))


def test_without_dot_the_source_is_written_and_the_message_says_what_to_install(
    result: rkgb.RkgbResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_once.cache_clear()
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    path = rkgb.stools.print_S_graph(result.S_graph, name="without")
    assert path is not None
    assert path.suffix == ".gv"
    assert "digraph" in path.read_text(encoding="utf-8")
    message = capsys.readouterr().out
    for hint in ("apt-get install graphviz", "brew install graphviz", "conda install", "dot -Tsvg"):
        assert hint in message


def test_what_cannot_be_drawn_says_so(result: rkgb.RkgbResult, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot draw a int: give a D, S or K graph"):
        rkgb.print_graph(3)
    with pytest.raises(ValueError, match="'bmp' was asked for; choose one of svg, pdf, png"):
        rkgb.print_graph(result.S_graph, render_format="bmp", folder=tmp_path)


def test_a_basic_graph_is_printed_as_text(
    result: rkgb.RkgbResult, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rkgb.print_graph(result.B_graph) is None
    assert "addmm = addmm(" in capsys.readouterr().out


@settings(max_examples=60)
@given(
    head=st.lists(st.integers(0, 2), max_size=3),
    pattern=st.lists(st.integers(3, 6), min_size=1, max_size=3),
    count=st.integers(1, 6),
)
def test_folding_keeps_every_distinct_cell_and_every_other_arrow(
    head: list[int], pattern: list[int], count: int
) -> None:
    signatures = head + pattern * count
    paths = [""] * len(head) + [f"layers.{i}.x" for i in range(count) for _ in pattern]
    folding = fold(paths, signatures)
    assert {signatures[i] for i in folding.shown} == set(signatures)
    for index, place in enumerate(folding.places):
        assert signatures[place.shown] == signatures[index]
    layers = [i for i in folding.shown if i >= len(head)]
    assert len(layers) <= len(pattern)
    for index in range(len(signatures) - 1):
        edge = folding.edge(index, index + 1)
        if edge is None:  # only between two copies of one pattern
            assert folding.places[index].copies != folding.places[index + 1].copies
        else:
            assert edge == (folding.places[index].shown, folding.places[index + 1].shown)


def test_nested_layers_fold_inside_each_other() -> None:
    paths = [f"stages.{i}.blocks.{j}.x" for i in range(3) for j in range(4)]
    folding = fold(paths, ["same"] * 12)
    assert folding.shown == (0,)
    assert sorted(repeat.count for repeat in folding.repeats) == [3, 4]
    assert fold(["a", "b", "c"], [1, 2, 3]).shown == (0, 1, 2)


def test_titles_name_the_network(result: rkgb.RkgbResult) -> None:
    assert "net: forward and backward" in dot_source(result.K_graph, "net")
    assert "net: blocks" in dot_source(result, "net")
    assert "Stack: simplified" in dot_source(result.S_graph)


def test_nodes_that_only_look_alike_are_not_folded() -> None:
    """A first layer with fewer inputs makes the same bytes as the next ones."""
    layers = [nn.Sequential(nn.Linear(3 if i == 0 else 8, 8), nn.Tanh()) for i in range(3)]
    result = result_of(nn.Sequential(*layers), torch.randn(2, 3))
    kinds = [cell.signature for cell in sketch_of(result.K_graph).cells]
    assert kinds[0] != kinds[2] == kinds[4]
    assert "2 ×" in dot_source(result.K_graph)
    assert "3 ×" not in dot_source(result.K_graph)


def test_a_few_equal_calls_inside_one_module_stay_apart() -> None:
    paths = ["attention"] * 3
    assert fold(paths, ["view"] * 3).shown == (0, 1, 2)
    assert fold(["cell"] * 12, ["step"] * 12).shown == (0,)


def test_a_box_shows_what_its_operation_makes() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.pool = nn.Linear(16, 500), nn.MaxPool1d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.pool(torch.cat(self.wide(x).split(250, -1))).relu()

    graph = rkgb.make_all_graphs(Pooled(), torch.randn(4, 8, 16), cost="flops").S_graph
    boxes = [cell.vertices["fwd"] for cell in sketch_of(graph).cells if "fwd" in cell.vertices]
    shown = {box.title: (box.detail.partition("\n")[0], box.weight) for box in boxes}
    made = {title: said for title, said in shown.items() if title in ("addmm", "linear")}
    assert [size for _, size in made.values()] == [4 * 8 * 500 * 4], "not the weight, transposed"
    ((detail, size),) = [s for title, s in shown.items() if title.startswith("max_pool")]
    assert size == 8 * 8 * 125 * 4, "without the places of the maxima"
    assert "int64" not in detail


@needs_dot
def test_a_notebook_shows_each_graph(
    result: rkgb.RkgbResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = (result, result.D_graph, result.S_graph, result.K_graph)
    for graph in graphs:
        text = graph._repr_html_()
        assert text.startswith("<p>&lt;")
        assert text.count("<svg") == 1
    monkeypatch.setenv("PATH", "")
    assert all("<svg" not in graph._repr_html_() for graph in graphs)
    assert all("\n" not in repr(one) for one in (*graphs, *result.list_ano_S))
