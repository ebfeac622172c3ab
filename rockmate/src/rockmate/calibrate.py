"""From inspected nodes to a Problem: one run of the executor itself gives exact memory.

Peaks and live gradient bytes are not derived on paper: how a kernel lays out a gradient, which
gradients share a storage and when autograd copies are all decided at run time, always the same way.
So the executor runs one step under a plan that needs little memory (chunks of the forward are
recomputed just before their backward), with the memory meter around every instruction.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rkgb.inspect_op import Inspection, NodeFacts
from rkgb.memory import MemoryTrace, Span, trace_memory
from rkgb.rng import RngState
from rkgb.runner import StepState
from rkgb.simplified import SimplifiedGraph
from rockmate.blocks import find_cuts
from rockmate.execute import Executor, Layout, gradient_bytes
from rockmate.problem import Node, Problem, Storage
from rockmate.program import Instruction, lower
from rockmate.reference import seed_backward
from rockmate.simulate import simulate
from rockmate.steps import Step

# The CUDA allocator hands out multiples of this (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize).
_CUDA_BLOCK_BYTES = 512
# A tensor without gradient that many nodes read (a mask, rotary tables) is kept for the whole step.
_SHARED_READERS = 3


@dataclass(frozen=True)
class Calibration:
    """The problem of one network, and how it maps to the runner's tensors."""

    problem: Problem
    layout: Layout
    margin_bytes: int  # by how much a step of the run exceeded its prediction; mostly 0
    trace: MemoryTrace


def calibrate(
    graph: SimplifiedGraph,
    inspection: Inspection,
    external: Mapping[str, Tensor],
    *,
    chunk_starts: Sequence[int] | None = None,
) -> Calibration:
    """Run one step on copies of the leaves and return the exact problem.

    `external` are the values of the user's module; parameters are shared (not copied), buffers are
    cloned, and no gradient reaches the user's tensors. The random stream is put back.

    Raises:
        SelfTestError, InvalidGraphError: the executor could not run the step.
    """
    runner = inspection.runner
    layout = build_layout(graph, inspection)
    skeleton = _skeleton(graph, inspection, layout)
    steps = _low_memory_steps(skeleton, chunk_starts)
    observed = _Observed(len(skeleton.nodes))
    stream = RngState.save(runner.device)
    try:
        trace = _run(skeleton, layout, inspection, external, steps, observed)
    finally:
        stream.restore()
    problem = _measured(skeleton, layout, steps, observed, trace, external)
    return Calibration(problem, layout, _margin(problem, steps, trace), trace)


def build_layout(graph: SimplifiedGraph, inspection: Inspection) -> Layout:
    """Return how storages, parameters and outputs of the problem map to names of the graph."""
    grad_names = inspection.runner.grad_names
    names: list[tuple[str, ...]] = []
    for fact in inspection.facts:
        names += [storage.names for storage in fact.storages]
        if fact.phantom_bytes:
            names.append(())
    return Layout(
        storage_names=tuple(names),
        outside=tuple(fact.outside for fact in inspection.facts),
        grad_inputs=tuple(
            tuple(n for n in node.inputs if n in grad_names) if fact.wants_grad else ()
            for node, fact in zip(graph.nodes, inspection.facts, strict=True)
        ),
        output_names=graph.output_names,
        differentiable=tuple(name in grad_names for name in graph.output_names),
    )


def leaf_copies(external: Mapping[str, Tensor], buffers: frozenset[str]) -> dict[str, Tensor]:
    """Return leaves that share memory with the user's tensors, and clones of the buffers.

    One tensor under two names (a tied weight) stays one leaf.
    """
    made: dict[int, Tensor] = {}
    copies = {}
    for name, tensor in external.items():
        if id(tensor) not in made:
            copy = tensor.detach().clone() if name in buffers else tensor.detach()
            made[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
        copies[name] = made[id(tensor)]
    return copies


# ---------------------------------------------------------------------- the problem without peaks


def _skeleton(graph: SimplifiedGraph, inspection: Inspection, layout: Layout) -> Problem:
    facts = inspection.facts
    outputs = [node.outputs for node in graph.nodes]
    reached = {n for n, d in zip(layout.output_names, layout.differentiable, strict=True) if d}
    has_backward = [False] * len(facts)
    for index in reversed(range(len(facts))):
        if facts[index].wants_grad and any(name in reached for name in outputs[index]):
            has_backward[index] = True
            reached.update(layout.grad_inputs[index])
    readers: dict[str, list[int]] = {}
    savers: dict[str, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        for name in node.inputs:
            readers.setdefault(name, []).append(index)
        if has_backward[index]:
            for name in facts[index].saved:
                savers.setdefault(name, []).append(index)
    storages: list[Storage] = []
    returned = set(layout.output_names)
    device = inspection.runner.device
    for index, fact in enumerate(facts):
        for made in fact.storages:
            fwd = {r for name in made.names for r in readers.get(name, ()) if r != index}
            bwd = {s for name in made.names for s in savers.get(name, ())}
            shared = not fact.wants_grad and len(fwd) >= _SHARED_READERS
            storages.append(
                Storage(
                    name=made.names[0],
                    size_bytes=_rounded(made.size_bytes, device),
                    producer=index,
                    fwd_users=tuple(sorted(fwd)),
                    bwd_users=tuple(sorted(bwd)),
                    is_output=shared or any(name in returned for name in made.names),
                )
            )
        if fact.phantom_bytes:
            storages.append(
                Storage(
                    name=f"phantoms of {graph.nodes[index].name}",
                    size_bytes=_rounded(fact.phantom_bytes, device),
                    producer=index,
                    bwd_users=(index,) if has_backward[index] else (),
                    is_phantom=True,
                )
            )
    nodes = [_node(graph, fact, index, has_backward[index]) for index, fact in enumerate(facts)]
    return Problem(tuple(nodes), tuple(storages))


def _node(graph: SimplifiedGraph, fact: NodeFacts, index: int, has_backward: bool) -> Node:
    node = graph.nodes[index]
    return Node(
        name=node.name,
        fwd_time_ms=fact.cost.fwd_time_ms,
        bwd_time_ms=fact.cost.bwd_time_ms if has_backward else 0.0,
        has_backward=has_backward,
        rerun_state_bytes=fact.state_bytes,
        module_path=node.module_path,
        op=node.main.target_name,
        source=node.main.source,
    )


def _rounded(size_bytes: int, device: torch.device) -> int:
    if device.type != "cuda":
        return size_bytes
    return -(-size_bytes // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES


# ---------------------------------------------------------------------- the run


def _low_memory_steps(problem: Problem, chunk_starts: Sequence[int] | None) -> tuple[Step, ...]:
    """Return steps that recompute the forward chunk by chunk: every node runs in both modes.

    Workspaces are not known yet; of the chunkings tried, that whose storages need least is taken,
    so that networks are calibrated whose plain step would not fit.
    """
    if chunk_starts is not None:
        return _chunked(problem, chunk_starts)
    count = len(problem.nodes)
    size = max(1, math.isqrt(count))
    borders = [cut + 1 for cut in find_cuts(problem)]
    tried: list[Sequence[int]] = [range(0, count, size)]
    for parts in sorted({size // 2, size, 2 * size} - {0}):
        tried.append(sorted({borders[i * len(borders) // parts] for i in range(parts) if borders}))
    plans = [_chunked(problem, starts) for starts in tried]
    return min(plans, key=lambda steps: simulate(problem, steps).peak_bytes)


def _chunked(problem: Problem, chunk_starts: Sequence[int]) -> tuple[Step, ...]:
    count = len(problem.nodes)
    bounds = sorted({0, *chunk_starts, count})
    steps = [Step("F", node) for node in range(count)]
    for low, high in reversed(list(itertools.pairwise(bounds))):
        backward = [n for n in reversed(range(low, high)) if problem.nodes[n].has_backward]
        if backward:
            steps += [Step("F", node) for node in range(low, high)]
            steps += [Step("B", node) for node in backward]
    return tuple(steps)


class _Observed:
    """What the run saw beside memory: which span belongs to which instruction."""

    def __init__(self, count: int) -> None:
        self.instructions: list[Instruction] = []
        self.gradient_bytes = [0] * count


def _run(
    problem: Problem,
    layout: Layout,
    inspection: Inspection,
    external: Mapping[str, Tensor],
    steps: Sequence[Step],
    observed: _Observed,
) -> MemoryTrace:
    runner = inspection.runner
    program = lower(problem, steps)
    buffers = frozenset(runner.graph.dataflow.basic.buffers)

    def run(span: Span) -> None:
        @contextlib.contextmanager
        def observe(instruction: Instruction, state: StepState) -> Iterator[None]:
            if instruction.kind == "B":
                observed.gradient_bytes[instruction.node] = gradient_bytes(state)
            observed.instructions.append(instruction)
            with span(f"{instruction.kind}{instruction.node}"):
                yield

        outputs = Executor(runner, problem, program, layout, observe)(leaves)
        seed_backward([t for t in outputs if t.requires_grad])

    leaves = leaf_copies(external, buffers)
    for leaf in dict.fromkeys(leaves.values()):
        if leaf.requires_grad:
            leaf.register_post_accumulate_grad_hook(_drop_gradient)
    gc.collect()
    return trace_memory(run, runner.device)


def _drop_gradient(leaf: Tensor) -> None:
    leaf.grad = None  # parameter gradients are outside the budget; nobody reads these


# ---------------------------------------------------------------------- from spans to peaks


def _measured(
    skeleton: Problem,
    layout: Layout,
    steps: Sequence[Step],
    observed: _Observed,
    trace: MemoryTrace,
    external: Mapping[str, Tensor],
) -> Problem:
    record = [0] * len(skeleton.nodes)
    nograd = [0] * len(skeleton.nodes)
    backward = [0] * len(skeleton.nodes)
    for instruction, span in zip(observed.instructions, trace.spans, strict=True):
        node = instruction.node
        if instruction.kind == "B":
            # Autograd takes the parameter gradients over after the span.
            highest = max(span.peak_bytes, span.next_peak_bytes)
            backward[node] = highest - span.start_bytes
        elif instruction.record:
            record[node] = max(record[node], span.added_peak_bytes)
        else:
            # A first run keeps no state; a later one works on copies of it.
            extra = 0 if instruction.is_rerun else skeleton.nodes[node].rerun_state_bytes
            nograd[node] = max(nograd[node], span.added_peak_bytes + extra)
    waiting = _waiting_gradients(skeleton, layout, external)
    nodes = tuple(
        replace(
            node,
            fwd_peak_bytes=record[index] or nograd[index],
            fwd_peak_nograd_bytes=nograd[index] or record[index],
            bwd_peak_bytes=backward[index],
            grads_before_bytes=observed.gradient_bytes[index] + waiting[index],
        )
        for index, node in enumerate(skeleton.nodes)
    )
    return Problem(nodes, skeleton.storages)


def _margin(problem: Problem, steps: Sequence[Step], trace: MemoryTrace) -> int:
    # Numbers that autograd wraps into 8-byte tensors pass by the hooks that see what is saved.
    predicted = simulate(problem, steps).peak_during
    spans = zip(trace.spans, predicted, strict=True)
    return max([0, *(span.peak_bytes - expected for span, expected in spans)])


def _waiting_gradients(
    problem: Problem, layout: Layout, external: Mapping[str, Tensor]
) -> list[int]:
    """Return, per node, the bytes of outside gradients that wait while its backward runs.

    Autograd sums all gradients of a tied weight before it accumulates them, so the first waits for
    the last; the gradient of an input waits for the end.
    """
    uses: dict[int, tuple[Tensor, list[int]]] = {}
    for node, names in enumerate(layout.outside):
        if problem.nodes[node].has_backward:
            for name in names:
                uses.setdefault(id(external[name]), (external[name], []))[1].append(node)
    waiting = [0] * len(problem.nodes)
    for tensor, nodes in uses.values():
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        first = min(nodes) if is_parameter else 0
        size = tensor.numel() * tensor.element_size()
        for node in range(first, max(nodes)):
            waiting[node] += _rounded(size, tensor.device)
    return waiting
