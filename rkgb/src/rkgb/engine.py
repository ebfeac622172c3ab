"""The public door for whoever executes plans on the graphs of this package.

graph = runnable(D_to_S(B_to_D(make_B(model, sample))))
measured = measure(basic, operations(graph.graph), external_values(basic, model, leaves))
facts = node_facts(graph.graph, measured.costs)      # sizes, times and peaks of every node
program = lower_step(graph.graph, steps)             # steps: ("F", k) and ("B", k)
step = compile_step(graph.graph, program, callee)    # step.forward, step.backward, step.source
"""

from __future__ import annotations

from rkgb.basic import (
    BackwardKind,
    BasicGraph,
    HandOver,
    Tangent,
    ambient_autocast,
    autocast_as,
    bind_inputs,
    check_device,
    external_values,
)
from rkgb.capture.record import make_B
from rkgb.capture.twin import detached_inputs, twin_of
from rkgb.costs.measure import Measured, Timing, measure
from rkgb.costs.node_facts import Cost, NodeFacts, node_facts
from rkgb.costs.op_costs import EXTRA_FLOP_FORMULAS, FlopCost, OpCost, op_key
from rkgb.dataflow import B_to_D
from rkgb.effects import plain_attributes
from rkgb.memory import MemoryTrace, Span, trace_memory
from rkgb.op import Op, Ref
from rkgb.passes import PLANNED_PASSES
from rkgb.rng import RngState
from rkgb.run.program import StepProgram, lower_step, without_idle_steps
from rkgb.run.source import CompiledStep, compile_step
from rkgb.run.source import plain_callee as choose_plainly
from rkgb.run.views import RunnableGraph, runnable
from rkgb.simplified import D_to_S, SimplifiedGraph, SimplifiedNode
from rkgb.storages import NodeStorage
from rkgb.tensor_info import storage_bytes, storage_id
from rkgb.torch_private import latest_sequence_nr, set_sequence_nr, straight_to_kernels

__all__ = [
    "EXTRA_FLOP_FORMULAS",
    "PLANNED_PASSES",
    "B_to_D",
    "BackwardKind",
    "BasicGraph",
    "CompiledStep",
    "Cost",
    "D_to_S",
    "FlopCost",
    "HandOver",
    "Measured",
    "MemoryTrace",
    "NodeFacts",
    "NodeStorage",
    "Op",
    "OpCost",
    "Ref",
    "RngState",
    "RunnableGraph",
    "SimplifiedGraph",
    "SimplifiedNode",
    "Span",
    "StepProgram",
    "Tangent",
    "Timing",
    "ambient_autocast",
    "autocast_as",
    "bind_inputs",
    "check_device",
    "choose_plainly",
    "compile_step",
    "detached_inputs",
    "external_values",
    "latest_sequence_nr",
    "lower_step",
    "make_B",
    "measure",
    "node_facts",
    "op_key",
    "operations",
    "plain_attributes",
    "runnable",
    "set_sequence_nr",
    "storage_bytes",
    "storage_id",
    "straight_to_kernels",
    "trace_memory",
    "twin_of",
    "without_idle_steps",
]


def operations(sg: SimplifiedGraph) -> tuple[Op, ...]:
    """Return every operation of a graph, forward and backward."""
    return tuple(op for node in sg.nodes for op in (*node.ops, *node.backward))
