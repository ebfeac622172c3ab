"""B, D and S compute what the module computes; cutting and classes keep what they promise."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rkgb
from rkgb.atlas.anonymize import anonymize, equivalence_classes
from rkgb.graphs.dataflow import B_to_D, DataFlowGraph
from rkgb.graphs.simplified import PASSES, D_to_S, cut
from rkgb.pictures.render import dot_source
from rkgb.published.check import assert_same_as_module
from zoo.examples import EXAMPLES, Residual, example


def graphs(name: str) -> tuple[nn.Module, tuple[object, ...], rkgb.BasicGraph, DataFlowGraph]:
    model, sample = example(name)
    bg = rkgb.Btools.make_B(model, sample)
    return model, sample, bg, B_to_D(bg, model, sample)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_graph_recomputes_the_module(name: str) -> None:
    model, sample, bg, dg = graphs(name)
    for graph in (bg, dg, D_to_S(dg)):
        assert_same_as_module(graph, model, sample)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("simplify", PASSES, ids=lambda p: p.__name__)
def test_every_pass_alone_preserves_the_outputs(name: str, simplify: object) -> None:
    model, sample, _, dg = graphs(name)
    sg = D_to_S(dg, passes=[simplify])  # type: ignore[list-item]
    assert_same_as_module(sg, model, sample)
    assert str(sg).count("\n[") == len(sg.nodes) - 1
    assert sg.nodes[0].main.target_name in dot_source(sg)


@pytest.mark.parametrize("name", ["convolutional", "mixed", "residual", "averaging"])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_any_topological_order_gives_the_same_result(name: str, seed: int) -> None:
    model, sample, _, dg = graphs(name)
    assert_same_as_module(dg, model, sample, order=_random_order(dg, seed))


def _random_order(dg: DataFlowGraph, seed: int) -> list[int]:
    source = random.Random(seed)
    waiting = {i: {*n.deps, *n.order_deps} for i, n in enumerate(dg.nodes)}
    order: list[int] = []
    while waiting:
        ready = [i for i, deps in waiting.items() if not deps - set(order)]
        order.append(source.choice(ready))
        del waiting[order[-1]]
    return order


def test_an_order_that_ignores_overwritten_memory_is_caught() -> None:
    """The oracle above can fail: swap an in-place operation with a reader of the old content."""
    model, sample, _, dg = graphs("averaging")
    names = [node.op.target_name for node in dg.nodes]
    order = list(range(len(names)))
    first, second = names.index("mul_"), names.index("mul")
    order[first], order[second] = order[second], order[first]
    with pytest.raises((AssertionError, KeyError)):
        assert_same_as_module(dg, model, sample, order=order)


@pytest.mark.parametrize("name", EXAMPLES)
def test_cut_pieces_concatenate_to_the_graph(name: str) -> None:
    _, _, _, dg = graphs(name)
    sg = D_to_S(dg)
    pieces = cut(sg)
    assert [n.name for p in pieces for n in p.nodes] == [n.name for n in sg.nodes]
    assert [op.name for p in pieces for n in p.nodes for op in n.ops] == [
        op.name for n in sg.nodes for op in n.ops
    ]
    for place in range(1, len(pieces)):
        made = {n for p in pieces[:place] for n in p.output_names}
        read = {n for p in pieces[place:] for node in p.nodes for n in node.inputs}
        crossing = {n for n in made & read if sg.infos[n].requires_grad}
        assert len({sg.infos[n].alias_of for n in crossing}) == 1


def test_equal_layers_are_one_class_and_others_are_not() -> None:
    torch.manual_seed(0)
    model, x = Residual(layers=12), torch.randn(4, 16)
    pieces = cut(D_to_S(B_to_D(rkgb.Btools.make_B(model, x), model, x)))
    classes = equivalence_classes([anonymize(piece).key for piece in pieces])
    # The first layer differs: its input requires no gradient.
    assert max(len(members) for members in classes) == 11


def test_anonymous_graphs_ignore_names() -> None:
    class Named(nn.Module):
        def __init__(self, names: tuple[str, str, str]) -> None:
            super().__init__()
            self.names = list(names)
            for name in names[:2]:
                self.add_module(name, nn.Linear(4, 4))
            self.register_buffer(names[2], torch.ones(4))

        def forward(self, first: torch.Tensor) -> torch.Tensor:
            renamed = getattr(self, self.names[0])(first).relu()
            return getattr(self, self.names[1])(renamed) + getattr(self, self.names[2])

    def graph(*names: str) -> rkgb.SimplifiedGraph:
        model, x = Named((names[0], names[1], names[2])), torch.randn(2, 4)
        return D_to_S(B_to_D(rkgb.Btools.make_B(model, x), model, x))

    one, other = graph("a", "b", "c"), graph("zeta", "alpha", "scale")
    assert str(one) != str(other)
    assert anonymize(one) == anonymize(other)
    # The second layer used twice is another graph: names matter only in being equal or not.
    assert anonymize(graph("a", "a", "c")) != anonymize(one)


@pytest.mark.parametrize("change", ["shape", "dtype", "attribute", "constant"])
def test_anonymous_graphs_tell_differences_apart(change: str) -> None:
    class Scaled(nn.Module):
        def __init__(self, slope: float, table: float) -> None:
            super().__init__()
            self.slope = slope
            self.table = torch.tensor([table, 2.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.leaky_relu(x, self.slope) * self.table

    def key(slope: float = 0.1, table: float = 1.0, rows: int = 3, kind: object = None) -> str:
        x = torch.randn(rows, 2, dtype=kind, requires_grad=True)  # type: ignore[call-overload]
        model = Scaled(slope, table)
        return anonymize(D_to_S(B_to_D(rkgb.Btools.make_B(model, x), model, x))).key

    assert key() == key()
    other = {
        "shape": lambda: key(rows=4),
        "dtype": lambda: key(kind=torch.float64),
        "attribute": lambda: key(slope=0.2),
        "constant": lambda: key(table=3.0),
    }[change]
    assert key() != other()


@pytest.mark.parametrize("name", EXAMPLES)
def test_two_runs_print_identical_graphs(name: str) -> None:
    first, second = graphs(name), graphs(name)
    assert str(first[2]) == str(second[2])
    assert str(first[3]) == str(second[3])
    assert str(D_to_S(first[3])) == str(D_to_S(second[3]))


def test_nodes_say_where_they_come_from() -> None:
    _, _, _, dg = graphs("convolutional")
    sg = D_to_S(dg)
    conv = next(n for n in sg.nodes if n.main.target_name == "convolution")
    assert conv.module_path == "conv1"
    assert conv.main.source.startswith("examples.py:")
    relu = next(op for n in sg.nodes for op in n.ops if op.target_name == "relu_")
    assert relu.source.startswith("examples.py:")


def test_building_leaves_module_and_random_stream_alone() -> None:
    model, sample = example("mixed")
    before = copy.deepcopy(model.state_dict())
    stream = torch.get_rng_state()
    rkgb.make_all_graphs(model, sample)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class Doubled(nn.Module):
    """Takes a tensor; as a tuple two of them, as a dict its arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        out = self.layer(x).relu()
        return self.layer(out if y is None else out + y)


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict"])
def test_published_pipeline_runs_as_written(kind: str) -> None:
    torch.manual_seed(0)
    model, tensors = Doubled(), (torch.randn(3, 4), torch.randn(3, 4))
    samples = {"tensor": tensors[0], "tuple": tensors, "dict": {"y": tensors[1], "x": tensors[0]}}
    sample = samples[kind]
    device = torch.device("cpu")
    bg = rkgb.Btools.make_B(model, sample, device)
    dg = rkgb.Dtools.B_to_D(bg, model, sample, device)
    sg = rkgb.Stools.D_to_S(dg, model, device)
    kg = rkgb.Ktools.S_to_K(sg, model, device)
    list_sg = rkgb.Stools.cut(sg)
    classes, list_kg, list_ano = rkgb.Atools.S_list_to_K_list_eco(list_sg, model, device)
    assert len(list_kg) == len(list_sg) == len(list_ano)
    assert sorted(i for members in classes for i in members) == list(range(len(list_sg)))
    assert sum(len(k.compute) for k in list_kg) == len(kg.compute)
    for graph in (bg, dg, sg):
        assert_same_as_module(graph, model, sample)
    result = rkgb.make_all_graphs(model, sample)
    assert str(result.S_graph) == str(sg)
    assert rkgb.test_rkgb(model, sample).equivalent_classes == result.equivalent_classes


def test_both_published_spellings_are_the_same_modules() -> None:
    for name in ("Atools", "Btools", "Dtools", "Ktools", "Stools"):
        assert getattr(rkgb, name) is getattr(rkgb, name.lower())


def test_forward_backward_graph_round_trips_through_json() -> None:
    model, sample = example("convolutional")
    result = rkgb.make_all_graphs(model, sample, cost="flops")
    assert rkgb.KGraph.from_json(result.K_graph.to_json()) == result.K_graph
    kinds = {node.kind for node in result.K_graph.data}
    assert kinds == {"data", "grad", "phantom"}
    assert {node.kind for node in result.K_graph.compute} == {"fwd", "bwd"}


def test_deterministic_costs_are_equal_between_two_runs() -> None:
    model, sample = example("residual")
    first = rkgb.make_all_graphs(model, sample, cost="flops").K_graph
    second = rkgb.make_all_graphs(model, sample, cost="flops").K_graph
    assert first == second
    assert sum(node.flops for node in first.compute) > 0


@pytest.mark.parametrize("name", ["residual", "mixed", "averaging"])
def test_measuring_one_of_each_class_gives_the_costs_of_all(name: str) -> None:
    model, sample = example(name)
    result = rkgb.make_all_graphs(model, sample, cost="flops")
    classes, list_kg, _ = rkgb.Atools.S_list_to_K_list_eco(
        list(result.S_graph_list), model, inputs=sample, cost="flops"
    )
    assert tuple(map(tuple, classes)) == result.equivalent_classes
    for ours, theirs in zip(list_kg, result.K_graph_list, strict=True):
        assert [(n.name, n.module_path) for n in ours.compute] == [
            (n.name, n.module_path) for n in theirs.compute
        ]
        assert [n.flops for n in ours.compute] == [n.flops for n in theirs.compute]
        assert sum(d.size_bytes for d in ours.data) == sum(d.size_bytes for d in theirs.data)
