"""Gradients over gradients: where a program does it, and that no bit differs for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

from oracles.check_program import check_program
from oracles.gradients import assert_same_gradients
from rkgb.capture.record import make_B
from rkgb.graphs.dataflow import B_to_D
from rkgb.graphs.simplified import D_to_S, SimplifiedGraph
from rkgb.run.graph.overwrite import ADD_SELECTED
from rkgb.run.graph.views import runnable
from rkgb.run.program.lowering import lower_step, without_idle_steps
from rkgb.run.program.places import Step

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "threshold": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": F.leaky_relu,
    "hardtanh": F.hardtanh,
}


class Net(nn.Module):
    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 24), nn.Linear(24, 5)
        self.inner = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x))).square().mean()


def graph_of(model: nn.Module, x: Tensor) -> SimplifiedGraph:
    return runnable(D_to_S(B_to_D(make_B(model, (x,))))).graph


def backward_calls(graph: SimplifiedGraph) -> list[str]:
    return [op.target_name for node in graph.nodes for op in node.backward]


def check(model: nn.Module, x: Tensor) -> None:
    assert_same_gradients(D_to_S(B_to_D(make_B(model, (x,)))), model, (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_of_activations(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Net(ACTIVATIONS[name]).to(dtype)
    x = torch.randn(33, 8, dtype=dtype)
    ops = [op for node in graph_of(model, x).nodes for op in node.backward]
    mine = [op for op in ops if op.target_name.startswith(f"{name}_backward")]
    assert [op.writes != () for op in mine] == [True]
    check(model, x)


def attend(x: Tensor) -> Tensor:
    q, k, v = x.unflatten(-1, (3, 8)).unbind(-2)
    return torch.cat([q * k, k * v, v], -1)


def selected(x: Tensor) -> Tensor:
    whole = x.unflatten(-1, (3, 8)).transpose(0, -2).contiguous()
    q, k, v = whole[0], whole[1], whole[-1]
    return torch.cat([(q * k).relu(), k * v, v], -1).transpose(0, 1).contiguous()


@pytest.mark.parametrize("inner", [attend, selected])
def test_parts_of_one_tensor(inner: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    check(Net(inner), torch.randn(2, 7, 8))


def test_a_part_is_added_without_the_zeros_around_it() -> None:
    model, x = Net(selected), torch.randn(2, 7, 8)
    calls = backward_calls(graph_of(model, x))
    assert calls.count("select_backward") == 1
    assert calls.count("add_selected_") == 2


@pytest.mark.parametrize("index", [0, 1, 2, -1])
def test_the_bits_are_those_of_the_sum_with_zeros(index: int) -> None:
    whole = torch.tensor([0.0, -0.0, 1.5]).repeat(4, 3, 1)
    part = torch.tensor([-0.0, -0.0, 2.5]).repeat(4, 1)
    other = torch.ops.aten.select_backward(part, whole.shape, 1, index)
    expected = whole + other
    ours = ADD_SELECTED(whole.clone(), part, list(whole.shape), 1, index)
    assert torch.equal(ours.view(torch.int32), expected.view(torch.int32))


def test_a_gradient_that_is_handed_over_is_left_alone() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return (((x + self.weight) + x.tanh() * self.weight).sin() + self.weight).sum()

    model, x = Twice(), torch.randn(6, requires_grad=True)
    graph = graph_of(model, x)
    count = len(graph.nodes)
    steps: list[Step] = [("F", k) for k in range(count)]
    steps += [("B", k) for k in reversed(range(count))]
    check_program(graph, lower_step(graph, without_idle_steps(graph, steps)))
    check(model, x)
