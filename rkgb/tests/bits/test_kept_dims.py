"""Sums that are made without the dimensions that autograd keeps and then looks away from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from oracles.check_program import check_program
from oracles.gradients import assert_same_gradients
from rkgb.capture.record import make_B
from rkgb.errors import InvalidGraphError
from rkgb.graphs.dataflow import B_to_D
from rkgb.graphs.simplified import D_to_S, SimplifiedGraph
from rkgb.run.graph.views import runnable
from rkgb.run.program.lowering import lower_step
from rkgb.run.program.places import Step
from rkgb.run.program.statements import Call

SUM = torch.ops.aten.sum.dim_IntList


class Broadcast(nn.Module):
    """A product with a parameter of any shape that can be broadcast, turned or not."""

    def __init__(self, shape: tuple[int, ...], *, turned: bool = False) -> None:
        super().__init__()
        self.scale, self.turned = nn.Parameter(torch.rand(shape) + 1), turned

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.t() if self.turned and self.scale.dim() == 2 else self.scale
        return (x * scale).tanh()


def recorded(model: nn.Module, x: Tensor) -> SimplifiedGraph:
    return D_to_S(B_to_D(make_B(model, (x,))))


def sums(graph: SimplifiedGraph) -> list[tuple[object, ...]]:
    ops = [op for node in graph.nodes for op in node.backward if op.target is SUM]
    return [op.args[1:] for op in ops]


def steps(graph: SimplifiedGraph) -> list[Step]:
    count = len(graph.nodes)
    return [*(("F", i) for i in range(count)), *(("B", i) for i in reversed(range(count)))]


def test_gradients_of_biases_are_summed_in_one_call() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    graph = recorded(model, torch.randn(5, 3))
    assert sums(graph) == [([0], True)] * 2
    calls = [op.target_name for node in runnable(graph).graph.nodes for op in node.backward]
    assert sums(runnable(graph).graph) == [([0],)] * 2
    assert "view" not in calls
    assert "as_strided" not in calls


@given(
    st.sampled_from([(), (1,), (4,), (3, 1), (3, 4), (1, 4), (2, 1, 1), (1, 3, 1), (2, 1, 4)]),
    st.booleans(),
    st.permutations([0, 1, 2]),
)
def test_any_shape_and_layout_gives_the_same_bits(shape, turned, order) -> None:
    torch.manual_seed(0)
    sizes = [2, 3, 4]
    x = torch.randn([sizes[d] for d in order]).permute([order.index(d) for d in range(3)])
    model = Broadcast(shape[::-1] if turned and len(shape) == 2 else shape, turned=turned)
    graph = recorded(model, x)
    found = runnable(graph).graph
    check_program(found, lower_step(found, steps(found)))
    assert_same_gradients(graph, model, (x,))


def test_a_sum_that_is_read_with_its_dimensions_keeps_them() -> None:
    graph = recorded(Broadcast((3, 1)), torch.randn(3, 4))
    assert sums(runnable(graph).graph) == [([1], True)]


@pytest.mark.parametrize("wrong", [([1],), ([0], True), ([0, 1],)], ids=str)
def test_the_checker_refuses_another_sum(wrong) -> None:
    graph = runnable(recorded(nn.Linear(3, 4), torch.randn(5, 3))).graph
    program = lower_step(graph, steps(graph))
    changed = tuple(
        Call(replace(s.op, args=(s.op.args[0], *wrong)))
        if isinstance(s, Call) and s.op.target is SUM
        else s
        for s in program.backward
    )
    check_program(graph, program)
    with pytest.raises(InvalidGraphError, match="sum"):
        check_program(graph, replace(program, backward=changed))
