"""Oracles for graphs: run one and compare with the module; small modules that exercise traps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rkgb.basic import BasicGraph, bind_inputs, external_values, run_op
from rkgb.dataflow import DataFlowGraph, _device_of
from rkgb.op import Op, Ref
from rkgb.rng import RngState
from rkgb.simplified import SimplifiedGraph

Graph = BasicGraph | DataFlowGraph | SimplifiedGraph


def run_graph(
    graph: Graph,
    model: nn.Module,
    sample: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    order: Sequence[int] | None = None,
) -> list[Any]:
    """Run the graph's operations under autograd and return the leaves of its result.

    `order` is any topological order of the graph's nodes; program order without it. Buffers are
    updated as the module would update them.
    """
    basic, groups, outputs = _parts(graph)
    leaves = tuple(pytree.tree_leaves(bind_inputs(sample, kwargs)))
    values: dict[str, Any] = dict(external_values(basic, model, leaves))
    for index in order if order is not None else range(len(groups)):
        for op in groups[index]:
            values[op.name] = run_op(op, values)
    return [values[out.name] if isinstance(out, Ref) else out for out in outputs]


def _parts(graph: Graph) -> tuple[BasicGraph, list[tuple[Op, ...]], Sequence[Any]]:
    if isinstance(graph, BasicGraph):
        return graph, [(op,) for op in graph.ops], graph.outputs
    if isinstance(graph, DataFlowGraph):
        return graph.basic, [(node.op,) for node in graph.nodes], graph.basic.outputs
    return graph.dataflow.basic, [node.ops for node in graph.nodes], graph.outputs


def assert_same_as_module(
    graph: Graph,
    model: nn.Module,
    sample: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    order: Sequence[int] | None = None,
) -> None:
    """Assert that graph and module return the same bits and leave the same random state.

    The module's buffers and the random stream are as before afterwards.

    Raises:
        AssertionError: an output or the random state differs.
    """
    device = _device_of(model, None)
    args, keywords = bind_inputs(sample, kwargs)
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    stream = RngState.save(device)

    def restore() -> None:
        stream.restore()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])

    expected = pytree.tree_leaves(model(*args, **keywords))
    end = RngState.save(device)
    updated = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    restore()
    found = run_graph(graph, model, sample, kwargs=kwargs, order=order)
    try:
        assert len(found) == len(expected), f"{len(found)} outputs, expected {len(expected)}"
        for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            same = torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs
            assert same, f"output {place} differs from the module's"
        assert RngState.save(device).equals(end), "the random state differs from the module's"
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, updated[name]), f"buffer '{name}' differs"
    finally:
        restore()
