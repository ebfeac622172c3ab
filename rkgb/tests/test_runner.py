"""The runner reproduces autograd's gradients in any driving, and owns no memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rkgb.basic import bind_inputs, external_values, make_B
from rkgb.dataflow import B_to_D
from rkgb.inspect_op import FlopCost, inspect_graph
from rkgb.memory import trace_memory
from rkgb.runner import Runner, StepState
from rkgb.simplified import D_to_S
from rkgb.tensor_info import storage_bytes, storage_id
from rkgb.testing import EXAMPLES, example

CPU = torch.device("cpu")


def prepared(name: str) -> tuple[nn.Module, tuple[Any, ...], Runner]:
    model, sample = example(name)
    graph = D_to_S(B_to_D(make_B(model, sample), model, sample))
    runner = Runner(graph, CPU)
    inspect_graph(runner, externals(model, sample, runner), FlopCost(), measure_memory=False)
    return model, sample, runner


def externals(model: nn.Module, sample: Any, runner: Runner) -> dict[str, Tensor]:
    leaves = tuple(pytree.tree_leaves(bind_inputs(sample)))
    return external_values(runner.graph.dataflow.basic, model, leaves)


def eager_gradients(model: nn.Module, sample: tuple[Any, ...]) -> list[Tensor | None]:
    outputs = [t for t in pytree.tree_leaves(model(*sample)) if isinstance(t, Tensor)]
    wanted = [t for t in outputs if t.requires_grad]
    return list(
        torch.autograd.grad(
            wanted,
            list(model.parameters()),
            [torch.ones_like(t) for t in wanted],
            allow_unused=True,
        )
    )


def our_gradients(
    model: nn.Module, sample: tuple[Any, ...], runner: Runner, recompute: int
) -> list[Tensor | None]:
    """Drive the runner: forward without graphs, forget some values, recompute all with graphs."""
    external = externals(model, sample, runner)
    state = StepState(external)
    nodes = range(len(runner.graph.nodes))
    for index in nodes:
        runner.forward(index, state, record=False, keep_state=True)
    for round_ in range(1 + recompute):
        for index in nodes:
            runner.forward(index, state, record=round_ == recompute, keep_state=False)
    for name in runner.graph.output_names:
        if name in runner.grad_names:
            state.grads[name] = torch.ones_like(state.values[name])
            state.borrowed.add(storage_id(state.grads[name]))
    found: dict[int, Tensor] = {}
    for index in reversed(nodes):
        for name, grad in runner.backward(index, state):
            key = id(external[name])
            if grad is not None:
                found[key] = found[key] + grad if key in found else grad
    assert not state.grads
    assert not state.grad_parts
    return [found.get(id(p)) for p in model.parameters()]


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("recompute", [0, 2])
def test_gradients_buffers_and_random_stream_equal_eager(name: str, recompute: int) -> None:
    model, sample, runner = prepared(name)
    twin = copy.deepcopy(model)
    for _ in range(3):
        start = torch.get_rng_state()
        expected = eager_gradients(twin, sample)
        end = torch.get_rng_state()
        torch.set_rng_state(start)
        found = our_gradients(model, sample, runner, recompute)
        assert torch.equal(torch.get_rng_state(), end)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)
        for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
            assert torch.equal(ours, theirs)


def test_contributions_out_of_order_are_collected() -> None:
    _, _, runner = prepared("overlapping")
    assert runner.collected == {"linear"}
    _, _, plain = prepared("residual")
    assert not plain.collected


def test_kernels_that_depend_on_the_grad_mode_are_found() -> None:
    _, _, runner = prepared("recurrent")
    names = {runner.graph.nodes[i].main.target_name for i in runner.always_record}
    assert names <= {"lstm"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_graphs_own_nothing_but_phantoms(name: str) -> None:
    model, sample, runner = prepared(name)
    external = externals(model, sample, runner)
    graph = runner.graph

    def run(span: Any) -> StepState:
        state = StepState(external)
        with span("all"):
            for index in range(len(graph.nodes)):
                runner.forward(index, state, record=True, keep_state=False)
            state.values.clear()
        return state

    trace = trace_memory(run, CPU)
    phantoms = [size for facts in runner.facts.values() for size in facts.phantoms.values()]
    hidden = 8 * sum(len(node.ops) for node in graph.nodes)  # numbers that autograd wraps
    assert trace.spans[0].end_bytes <= sum(phantoms) + hidden


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_the_meter_sees_every_byte(sizes: list[int]) -> None:
    def run(span: Any) -> list[Tensor]:
        with span("first"):
            kept = [torch.empty(size, dtype=torch.uint8) for size in sizes]
            temporary = torch.empty(7000, dtype=torch.uint8)
            del temporary
        with span("second"):
            kept.pop()
        return kept

    trace = trace_memory(run, CPU)
    first, second = trace.spans
    assert first.added_peak_bytes == sum(sizes) + 7000
    assert first.end_bytes == second.start_bytes == sum(sizes)
    assert second.end_bytes == sum(sizes[:-1])
    assert trace.peak_bytes == sum(sizes) + 7000


def test_storage_helpers_follow_views() -> None:
    base = torch.zeros(10)
    assert storage_id(base[2:4]) == storage_id(base)
    assert storage_bytes(base[2:4]) == 40


def test_nodes_run_inside_an_outer_gradient_for_chosen_inputs() -> None:
    """An outer autograd.grad tells every node which results it needs, ours included."""
    model, sample, runner = prepared("residual")
    collected: list[Tensor | None] = []

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            collected.extend(our_gradients(model, sample, runner, 0))
            return grad

    torch.manual_seed(3)
    expected = eager_gradients(model, sample)
    torch.manual_seed(3)
    x = torch.ones(1, requires_grad=True)
    torch.autograd.grad(Outer.apply(x).sum(), [x])
    for ours, theirs in zip(collected, expected, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)
