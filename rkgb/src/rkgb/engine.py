"""The public door for whoever executes plans on the graphs of this package.

graph = runnable(D_to_S(B_to_D(make_B(model, sample))))
measured = measure(basic, operations(graph.graph), external_values(basic, model, leaves))
facts = node_facts(graph.graph, measured.costs)      # sizes, times and peaks of every node
program = lower_step(graph.graph, steps)             # steps: ("F", k) and ("B", k)
step = compile_step(graph.graph, program, callee)    # step.forward, step.backward, step.source
"""

from __future__ import annotations

from rkgb.capture.collector import no_collection
from rkgb.capture.hooks import may_run_again
from rkgb.capture.record import make_B, record
from rkgb.capture.sizes import SizedStep, record_sizes
from rkgb.capture.twin import Twin, twin_of
from rkgb.compiled.freeing import freeing
from rkgb.compiled.rewrite import CompiledGraph, compile_pieces, compile_variant
from rkgb.costs.foreseen import Foreseen, foresee
from rkgb.costs.measure import Measured, Timing, choose_callees, measure
from rkgb.costs.node_facts import Cost, NodeFacts, node_facts
from rkgb.costs.op_costs import FlopCost, OpCost, cost_of_piece, op_key
from rkgb.costs.plain_step import plain_peak_bytes
from rkgb.costs.scaled import measure_resized
from rkgb.device.base import Device
from rkgb.device.chosen import device_of
from rkgb.device.memory import MemoryTrace, Span, trace_memory
from rkgb.device.rng import KeptGenerators, RngState
from rkgb.elements.compiled_call import CompiledCall
from rkgb.elements.effects import Assign, Check, Effect, Look, Write
from rkgb.elements.op import Op, Ref
from rkgb.elements.sample import Sample, bind_inputs
from rkgb.elements.tensor_info import TensorInfo, storage_bytes, storage_id
from rkgb.elements.trees import Structure, UnknownTreeError, flatten
from rkgb.graphs.basic import (
    BackwardKind,
    BasicGraph,
    HandOver,
    Tangent,
    ambient_autocast,
    autocast_as,
    external_values,
)
from rkgb.graphs.compare import same_but_for_numbers, same_but_for_sizes
from rkgb.graphs.dataflow import B_to_D
from rkgb.graphs.passes import PLANNED_PASSES
from rkgb.graphs.simplified import D_to_S, SimplifiedGraph, SimplifiedNode
from rkgb.opaque.module_state import PythonRandom, StartOfCall
from rkgb.opaque.piece import RunPiece, is_inside, running_on
from rkgb.recording.watch import transparent_checkpoints
from rkgb.run.node_storages import NodeStorage
from rkgb.run.program import lower_step, rerun_state, without_idle_steps
from rkgb.run.reads import Outcomes
from rkgb.run.source import CompiledStep, compile_step
from rkgb.run.source import plain_callee as choose_plainly
from rkgb.run.statements import StepProgram
from rkgb.run.views import RunnableGraph, runnable
from rkgb.safeguards.refusals import refuse_lazy_modules
from rkgb.torch_api.flop_formulas import EXTRA_FLOP_FORMULAS
from rkgb.torch_api.kernel_choice import KernelChoice, RecomputingAs, with_flags
from rkgb.torch_api.torch_private import (
    current_dispatch_modes,
    group_store,
    is_cast_anew,
    is_transforming,
    keeps_graph,
    kernel_flags,
    latest_sequence_nr,
    named_kernel_flags,
    same_kinds,
    set_sequence_nr,
    straight_to_kernels,
    without_hooks_after_gradients,
)

__all__ = [
    "EXTRA_FLOP_FORMULAS",
    "PLANNED_PASSES",
    "Assign",
    "B_to_D",
    "BackwardKind",
    "BasicGraph",
    "Check",
    "CompiledCall",
    "CompiledGraph",
    "CompiledStep",
    "Cost",
    "D_to_S",
    "Device",
    "Effect",
    "FlopCost",
    "Foreseen",
    "HandOver",
    "KeptGenerators",
    "KernelChoice",
    "Look",
    "Measured",
    "MemoryTrace",
    "NodeFacts",
    "NodeStorage",
    "Op",
    "OpCost",
    "Outcomes",
    "PythonRandom",
    "RecomputingAs",
    "Ref",
    "RngState",
    "RunPiece",
    "RunnableGraph",
    "Sample",
    "SimplifiedGraph",
    "SimplifiedNode",
    "SizedStep",
    "Span",
    "StartOfCall",
    "StepProgram",
    "Structure",
    "Tangent",
    "TensorInfo",
    "Timing",
    "Twin",
    "UnknownTreeError",
    "Write",
    "ambient_autocast",
    "autocast_as",
    "bind_inputs",
    "choose_callees",
    "choose_plainly",
    "compile_pieces",
    "compile_step",
    "compile_variant",
    "cost_of_piece",
    "current_dispatch_modes",
    "device_of",
    "external_values",
    "flatten",
    "foresee",
    "freeing",
    "group_store",
    "is_cast_anew",
    "is_inside",
    "is_transforming",
    "keeps_graph",
    "kernel_flags",
    "latest_sequence_nr",
    "lower_step",
    "make_B",
    "may_run_again",
    "measure",
    "measure_resized",
    "named_kernel_flags",
    "no_collection",
    "node_facts",
    "op_key",
    "operations",
    "plain_peak_bytes",
    "record",
    "record_sizes",
    "refuse_lazy_modules",
    "rerun_state",
    "runnable",
    "running_on",
    "same_but_for_numbers",
    "same_but_for_sizes",
    "same_kinds",
    "set_sequence_nr",
    "storage_bytes",
    "storage_id",
    "straight_to_kernels",
    "trace_memory",
    "transparent_checkpoints",
    "twin_of",
    "with_flags",
    "without_hooks_after_gradients",
    "without_idle_steps",
]


def operations(sg: SimplifiedGraph) -> tuple[Op, ...]:
    """Return every operation of a graph, forward and backward."""
    return tuple(op for node in sg.nodes for op in (*node.ops, *node.backward))
