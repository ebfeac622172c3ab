"""The public functions for executing plans on the graphs of this package.

    >>> sample = bind_inputs(x)                           # the arguments of a call
    >>> basic = record(model, sample)                     # B: one step, as it ran
    >>> graph = runnable(D_to_S(B_to_D(basic)))           # S: what plans are about
    >>> values = external_values(basic, model, leaves)    # parameters, buffers and inputs
    >>> measured = measure(basic, operations(graph.graph), values)
    >>> facts = node_facts(graph.graph, measured.costs)   # sizes, times and peaks of every node
    >>> program = lower_step(graph.graph, steps)          # steps: ("F", k) and ("B", k)
    >>> step = compile_step(graph.graph, program, plain_callee)  # .forward, .backward, .source

`trace_memory` measures the memory of a run on the device that `device_of` returns. The types of
these functions, and rarely needed functions, are in the packages of the stages: `rkgb.elements`,
`rkgb.module_state`, `rkgb.graphs`, `rkgb.capture`, `rkgb.opaque`, `rkgb.recording`,
`rkgb.safeguards`, `rkgb.costs`, `rkgb.run`, `rkgb.compiled`, `rkgb.device`, `rkgb.torch_api`. Each
name is exported from one place.
"""

from __future__ import annotations

from rkgb.capture.record import record
from rkgb.costs.measure import measure
from rkgb.costs.node_facts import node_facts
from rkgb.device.chosen import device_of, trace_memory
from rkgb.elements.sample import Sample, bind_inputs
from rkgb.graphs.basic import external_values
from rkgb.graphs.dataflow import B_to_D
from rkgb.graphs.simplified import D_to_S, operations
from rkgb.run.graph.views import runnable
from rkgb.run.program.lowering import lower_step
from rkgb.run.program.source import compile_step, plain_callee

__all__ = [
    "B_to_D",
    "D_to_S",
    "Sample",
    "bind_inputs",
    "compile_step",
    "device_of",
    "external_values",
    "lower_step",
    "measure",
    "node_facts",
    "operations",
    "plain_callee",
    "record",
    "runnable",
    "trace_memory",
]
