"""Graphs and costs go into a file and come back, without the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import rkgb
from oracles.gradients import assert_same_gradients
from rkgb.atlas.serialize import decode, encode
from rkgb.pictures.render import dot_source
from rkgb.published.check import assert_same_as_module
from zoo.examples import EXAMPLES, example

HAS_CUDA = torch.cuda.is_available()


@pytest.mark.parametrize("name", EXAMPLES)
def test_graphs_and_costs_come_back_from_a_file(name: str, tmp_path: Path) -> None:
    model, sample = example(name)
    result = rkgb.make_all_graphs(model, sample, cost="flops")
    result.save(tmp_path / "graphs.json")
    loaded = rkgb.RkgbResult.load(tmp_path / "graphs.json")
    for ours, theirs in (
        (loaded.B_graph, result.B_graph),
        (loaded.D_graph, result.D_graph),
        (loaded.S_graph, result.S_graph),
    ):
        assert str(ours) == str(theirs)
    assert loaded.K_graph == result.K_graph
    assert loaded.K_graph_list == result.K_graph_list
    assert loaded.equivalent_classes == result.equivalent_classes
    assert loaded.list_ano_S == result.list_ano_S
    assert loaded.B_graph.hand_overs == result.B_graph.hand_overs
    assert [str(op) for op in loaded.B_graph.backward] == [
        str(op) for op in result.B_graph.backward
    ]
    assert loaded.B_graph.infos == result.B_graph.infos
    assert loaded.B_graph.kind == result.B_graph.kind
    assert loaded.inspection.facts == result.inspection.facts
    assert loaded.inspection.classes == result.inspection.classes


@pytest.mark.parametrize("name", EXAMPLES)
def test_loaded_graphs_run_again_with_the_model(name: str, tmp_path: Path) -> None:
    model, sample = example(name)
    rkgb.make_all_graphs(model, sample, cost="flops").save(tmp_path / "graphs.json")
    loaded = rkgb.RkgbResult.load(tmp_path / "graphs.json")
    for graph in (loaded.B_graph, loaded.D_graph, loaded.S_graph):
        assert_same_as_module(graph, model, sample)
    assert_same_gradients(loaded.S_graph, model, sample)


def test_recorded_costs_are_used_in_place_of_measurements(tmp_path: Path) -> None:
    model, sample = example("residual")
    measured = rkgb.make_all_graphs(model, sample)
    measured.costs.save(tmp_path / "costs.json")
    recorded = rkgb.RecordedCosts.load(tmp_path / "costs.json")
    assert recorded == measured.costs
    again = rkgb.make_all_graphs(model, sample, cost=recorded)
    assert again.K_graph == measured.K_graph
    assert again.inspection.facts == measured.inspection.facts
    assert_same_gradients(again.S_graph, model, sample)


def test_costs_of_another_model_are_refused_by_name() -> None:
    model, sample = example("residual")
    recorded = rkgb.make_all_graphs(model, sample, cost="flops").costs
    with pytest.raises(
        rkgb.InvalidGraphError, match=r"none for 't' \(0, .*\.py:\d+\)\. Record them"
    ):
        rkgb.make_all_graphs(nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3), cost=recorded)


def test_an_unknown_cost_source_is_refused() -> None:
    with pytest.raises(ValueError, match="cost is 'guess'; choose 'measured', 'flops', or"):
        rkgb.make_all_graphs(nn.Linear(2, 2), torch.randn(1, 2), cost="guess")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [
        float("inf"),
        complex(1, -2),
        [1, (2.5, None)],
        torch.bfloat16,
        torch.channels_last,
        torch.device("cpu"),
        {"a": [True, "x"]},
    ],
    ids=str,
)
def test_arguments_come_back_as_they_were(value: object) -> None:
    assert decode(json.loads(json.dumps(encode(value)))) == value


def test_what_has_no_place_in_a_file_is_refused() -> None:
    with pytest.raises(rkgb.InvalidGraphError, match=r"cannot write a slice \(slice\(0, 3"):
        encode([slice(0, 3)])


def test_tensors_come_back_with_their_bits() -> None:
    for tensor in (
        torch.randn(3, 2).t(),
        torch.randn(2, dtype=torch.cfloat).conj(),
        torch.tensor(float("nan")),
        torch.empty(0, 4),
        torch.randn(3).bfloat16(),
    ):
        found = decode(json.loads(json.dumps(encode(tensor))))
        assert found.dtype == tensor.dtype
        torch.testing.assert_close(found, tensor.resolve_conj(), rtol=0, atol=0, equal_nan=True)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"format": "something"}', encoding="utf-8")
    with pytest.raises(rkgb.InvalidGraphError, match="no file of graphs"):
        rkgb.RkgbResult.load(path)
    with pytest.raises(rkgb.InvalidGraphError, match="no recording of costs"):
        rkgb.RecordedCosts.load(path)


READER = """
import sys
import rkgb
from rkgb.pictures.render import dot_source

loaded = rkgb.RkgbResult.load(sys.argv[1])
for graph in (loaded.B_graph, loaded.D_graph, loaded.S_graph, loaded.K_graph):
    print(graph)
print(dot_source(loaded.K_graph), dot_source(loaded))
assert "somewhere" not in sys.modules
"""


def test_another_process_reads_and_prints_the_same_without_the_model(tmp_path: Path) -> None:
    """Its hashes are seeded differently, and the device of the file is none that it has."""

    class Somewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x).relu()
            return x

    Somewhere.__module__ = "somewhere"
    result = rkgb.make_all_graphs(Somewhere(), torch.randn(2, 4), cost="flops")
    path = tmp_path / "graphs.json"
    result.save(path)
    rows = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**rows, "device": "cuda:7"}), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", READER, str(path)],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    graphs = (result.B_graph, result.D_graph, result.S_graph, result.K_graph)
    expected = "".join(f"{graph}\n" for graph in graphs)
    assert done.stdout.startswith(expected)
    drawn = f"{dot_source(result.K_graph)} {dot_source(result)}\n"
    assert done.stdout.removeprefix(expected) == drawn


class WithFlags(nn.Module):
    """Sets a flag around its convolution, and holds a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = nn.Conv2d(2, 2, 3), torch.arange(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._C._set_mkldnn_enabled(False)
        try:
            y = self.inner(x)
        finally:
            torch._C._set_mkldnn_enabled(True)
        return y.mean() * self.own


def test_flags_and_places_of_constants_come_back_from_a_file(tmp_path: Path) -> None:
    model, sample = WithFlags(), torch.randn(1, 2, 5, 5)
    result = rkgb.make_all_graphs(model, sample, cost="flops")
    file = tmp_path / "graphs.json"
    result.save(file)
    loaded = rkgb.RkgbResult.load(file).B_graph
    flags = {op.target_name: op.flags for op in loaded.ops}
    assert flags["convolution"] == (("mkldnn.enabled", False),)
    assert flags["mul"] == ()
    assert_same_as_module(loaded, model, (sample,))
    assert_same_gradients(rkgb.RkgbResult.load(file).S_graph, model, (sample,))
    # What was on another device is there again, and on the CPU where there is no CUDA.
    row = encode(model.own)
    for place, expected in (("meta", "meta"), ("cuda:0", "cuda" if HAS_CUDA else "cpu")):
        row["tensor"]["device"] = place
        assert decode(row).device.type == expected
