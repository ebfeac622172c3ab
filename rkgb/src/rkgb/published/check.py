"""The published check of a module: every graph, and the simplified one run against the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from rkgb.api import RkgbResult, make_all_graphs
from rkgb.device.rng import RngState
from rkgb.elements.effect import Assign
from rkgb.elements.op import Op, Ref, run_op
from rkgb.elements.sample import Sample, own_copy
from rkgb.elements.tensor_info import same_bits
from rkgb.elements.trees import flatten
from rkgb.graphs.basic import BasicGraph, external_values
from rkgb.graphs.dataflow import DataFlowGraph
from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.module_state.start_of_call import StartOfCall
from rkgb.torch_api.private.autograd import straight_to_kernels

Graph = BasicGraph | DataFlowGraph | SimplifiedGraph


def test_rkgb(model: nn.Module, sample: Any, **options: Any) -> RkgbResult:
    """Build every graph, run the simplified one against the module, and print a summary.

    Raises:
        AssertionError: the graph's outputs differ from the module's.
    """
    result = make_all_graphs(model, sample, **options)
    assert_same_as_module(result.S_graph, model, sample, kwargs=options.get("kwargs"))
    print(result)
    return result


test_rkgb.__test__ = False  # type: ignore[attr-defined]  # a public function, not a pytest test


def run_graph(
    graph: Graph,
    model: nn.Module,
    sample: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    order: Sequence[int] | None = None,
) -> list[Any]:
    """Run the graph's operations and return the leaves of its result.

    `order` is any topological order of the graph's nodes; the default is program order. Buffers are
    updated as by the module.
    """
    basic, groups, outputs = _parts(graph)
    leaves = Sample.of(model, sample, kwargs).leaves
    values: dict[str, Any] = dict(external_values(basic, model, leaves))
    with straight_to_kernels():
        for index in order if order is not None else range(len(groups)):
            for op in groups[index]:
                run_op(op, values)
    return [values[out.name] if isinstance(out, Ref) else out for out in outputs]


def _parts(graph: Graph) -> tuple[BasicGraph, list[tuple[Op, ...]], Sequence[Any]]:
    if isinstance(graph, BasicGraph):
        return graph, [(op,) for op in graph.ops], graph.outputs
    if isinstance(graph, DataFlowGraph):
        return graph.basic, [(node.op,) for node in graph.nodes], graph.basic.outputs
    return graph.basic, [node.ops for node in graph.nodes], graph.outputs


def assert_same_as_module(
    graph: Graph,
    model: nn.Module,
    sample: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    order: Sequence[int] | None = None,
) -> None:
    """Assert that graph and module return the same bits and leave the same random state.

    The module's buffers and the random state are restored.

    Raises:
        AssertionError: an output or the random state differs.
    """
    given = Sample.of(model, sample, kwargs)
    device = given.device
    start = StartOfCall(model, device)
    copies = given.with_leaves(tuple(map(own_copy, given.leaves)))  # it may write to them
    expected = flatten(model(*copies.args, **copies.kwargs))[0]
    end = RngState.save(device)
    updated = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    start.restore()
    found = run_graph(graph, model, sample, kwargs=kwargs, order=order)
    try:
        found = list(_without_effects(_parts(graph)[0], found, model))
        assert len(found) == len(expected), f"{len(found)} outputs, expected {len(expected)}"
        for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert same_bits(ours, theirs), f"output {place} differs from the module's"
        assert RngState.save(device).equals(end), "the random state differs from the module's"
        for name, buffer in model.named_buffers():
            assert same_bits(buffer, updated[name]), f"buffer '{name}' differs"
    finally:
        start.restore()


def _without_effects(basic: BasicGraph, found: Sequence[Any], model: nn.Module) -> Sequence[Any]:
    """Return what the forward returns, and set its side effects on the model."""
    if not basic.effects:
        return found
    result, values = basic.output_spec.unflatten(found)
    for effect, value in zip(basic.effects, values, strict=True):
        if isinstance(effect, Assign):
            effect.apply(model, value)
    return flatten(result)[0]
