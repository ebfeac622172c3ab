"""Measure what each node costs, one class of equal nodes at a time, on real values.

The forward is walked node by node. Every node is recorded once, to learn which tensors its backward
saves; a node that is the first of its class is also timed, forward and backward, right there. Only
values that a later node reads stay alive, so a network whose activations do not fit can still be
measured. The caller's buffers, gradients and random stream are left alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from rkgb.anonymize import node_key
from rkgb.memory import SpanMemory, trace_memory
from rkgb.rng import RngState
from rkgb.runner import Runner, StepState
from rkgb.tensor_info import storage_bytes, storage_id


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of one node; FLOPs where they were counted."""

    fwd_time_ms: float
    bwd_time_ms: float
    fwd_flops: int = 0
    bwd_flops: int = 0


class CostSource(Protocol):
    """Measures a node that `prepare` makes ready and `forward`, `backward` run."""

    def __call__(
        self,
        prepare: Callable[[], None],
        forward: Callable[[], None],
        backward: Callable[[], None] | None,
        moved_bytes: int,
    ) -> Cost: ...


@runtime_checkable
class KnownCosts(Protocol):
    """Knows costs beforehand, by the key of a node (see `rkgb.recording`); runs nothing."""

    def lookup(self, key: str, where: str) -> tuple[Cost, int, int]:
        """Return the cost and the overheads in bytes; `where` names the node in an error."""


@dataclass(frozen=True)
class MeasuredTime:
    """Wall time: the median of runs repeated until it is stable, after one that is not counted.

    Stable is when the middle half of the runs spans at most `spread` of the median. On a machine so
    busy that it never does, `patience_ms` of undisturbed runs end it: planning cannot wait for
    silence.
    """

    device: torch.device
    min_repeats: int = 3
    max_repeats: int = 25
    enough_ms: float = 8.0
    patience_ms: float = 200.0
    spread: float = 0.1

    def __call__(
        self,
        prepare: Callable[[], None],
        forward: Callable[[], None],
        backward: Callable[[], None] | None,
        moved_bytes: int,
    ) -> Cost:
        fwd: list[float] = []
        bwd: list[float] = []
        for turn in range(self.max_repeats + 1):
            prepare()
            fwd.append(self._time(forward))
            bwd.append(self._time(backward) if backward is not None else 0.0)
            if turn < self.min_repeats or sum(fwd) + sum(bwd) <= self.enough_ms:
                continue
            undisturbed_ms = turn * (min(fwd[1:]) + min(bwd[1:]))
            if self._stable(fwd[1:]) and self._stable(bwd[1:]):
                break
            if undisturbed_ms > self.patience_ms:
                break
        return Cost(statistics.median(fwd[1:]), statistics.median(bwd[1:]))

    def _stable(self, times_ms: list[float]) -> bool:
        low, median, high = statistics.quantiles(times_ms, n=4, method="inclusive")
        return high - low <= self.spread * median

    def _time(self, run: Callable[[], None]) -> float:
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end))
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e3


def _sdpa_forward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


def _sdpa_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, q, k, v))


# torch has no formula for the CPU's flash attention; without one attention looks free.
EXTRA_FLOP_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward,
}


@dataclass(frozen=True)
class FlopCost:
    """Deterministic: FLOPs, plus a small weight per byte moved and per operation.

    One millisecond stands for 10^9 FLOPs. The weights (2 per byte, 1000 per operation) keep
    operations without FLOPs from being free.
    """

    flops_per_byte: float = 2.0
    flops_per_op: float = 1000.0

    def __call__(
        self,
        prepare: Callable[[], None],
        forward: Callable[[], None],
        backward: Callable[[], None] | None,
        moved_bytes: int,
    ) -> Cost:
        prepare()
        fwd = self._count(forward)
        bwd = self._count(backward) if backward is not None else 0
        small = self.flops_per_byte * moved_bytes + self.flops_per_op
        bwd_ms = (bwd + 2 * small) / 1e9 if backward is not None else 0.0
        return Cost((fwd + small) / 1e9, bwd_ms, fwd, bwd)

    def _count(self, run: Callable[[], None]) -> int:
        with FlopCounterMode(display=False, custom_mapping=EXTRA_FLOP_FORMULAS) as counter:
            run()
        return int(counter.get_total_flops())


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """One storage that a node makes: the values that live in it, and its size."""

    names: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True)
class NodeFacts:
    """What one node makes, saves and costs."""

    cost: Cost
    storages: tuple[StorageFacts, ...]  # made by the node; views of resident memory are left out
    saved: tuple[str, ...]  # values, its own or its inputs', that its backward reads
    phantom_bytes: int
    state_bytes: int  # random state and buffer copies that a recomputation needs
    wants_grad: bool  # records an autograd graph
    outside: tuple[str, ...]  # parameters and inputs that get a gradient, one entry per use
    fwd_overhead_bytes: int = 0  # temporary part of the forward, above what it leaves behind
    bwd_overhead_bytes: int = 0
    class_id: int = 0


@dataclass(frozen=True)
class Inspection:
    """Facts about every node, and the runner that learned what each of them saves."""

    runner: Runner
    facts: tuple[NodeFacts, ...]
    classes: tuple[tuple[int, ...], ...]  # equal nodes
    seconds: float


def inspect_graph(
    runner: Runner,
    external: Mapping[str, Tensor],
    source: CostSource | KnownCosts,
    *,
    values: Mapping[str, Tensor] | None = None,
    measure_memory: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Inspection:
    """Walk the graph of `runner` once and return the facts of its nodes.

    `external` are the parameters, buffers, constants and inputs; `values` what the graph reads
    besides (for a piece of a larger graph). `measure_memory` also finds the overheads, at the price
    of a second run of each class under the memory meter.
    """
    began = time.perf_counter()
    walk = _Inspector(runner, external, source, dict(values or {}), measure_memory)
    stream = RngState.save(runner.device)
    try:
        facts = walk.run(progress)
    finally:
        stream.restore()
    classes: dict[int, list[int]] = {}
    for index, fact in enumerate(facts):
        classes.setdefault(fact.class_id, []).append(index)
    return Inspection(
        runner, tuple(facts), tuple(map(tuple, classes.values())), time.perf_counter() - began
    )


class _Inspector:
    def __init__(
        self,
        runner: Runner,
        external: Mapping[str, Tensor],
        source: CostSource | KnownCosts,
        values: dict[str, Tensor],
        measure_memory: bool,
    ) -> None:
        self.runner = runner
        self.source = source
        self.measure_memory = measure_memory
        self.state = StepState(external=dict(external), values=values)
        self.resident = {storage_id(t) for t in self.state.external.values()}
        for name, tensor in values.items():
            if tensor.requires_grad:
                runner.grad_names.add(name)
                self.state.values[name] = tensor.detach()
        self.costs: dict[str, tuple[int, Cost, int, int, bool]] = {}

    def run(self, progress: Callable[[int, int], None] | None) -> list[NodeFacts]:
        graph = self.runner.graph
        last_reader = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}
        kept = set(graph.output_names)
        facts = []
        for index, node in enumerate(graph.nodes):
            facts.append(self._inspect(index))
            for name in (*node.inputs, *node.outputs):
                if last_reader.get(name, -1) <= index and name not in kept:
                    self.state.values.pop(name, None)
            if progress is not None:
                progress(index + 1, len(graph.nodes))
        return facts

    def _inspect(self, index: int) -> NodeFacts:
        runner, state = self.runner, self.state
        node = runner.graph.nodes[index]
        # Run as a recomputation: on copies of the buffers, and with a random state of its own.
        state.ran.add(index)
        if runner.volatile[index]:
            state.buffers[index] = {n: state.external[n] for n in runner.volatile[index]}
        if node.is_random:
            state.rng[index] = RngState.save(runner.device)
        key = node_key(runner.graph, node)
        known = self.costs.get(key)
        if known is not None and known[4]:
            runner.always_record.add(index)
        elif known is None:
            runner.forward(index, state, record=False, keep_state=False)
            plain = {name: state.values[name] for name in node.outputs}
        runner.forward(index, state, record=True, keep_state=False)
        if known is None:
            differs = any(not torch.equal(plain[n], state.values[n]) for n in node.outputs)
            if differs:
                runner.always_record.add(index)
            del plain
        outside = runner.outside_uses(index, state)
        storages = self._storages(index)
        pieces = [runner.facts[index, number] for number in range(len(runner.pieces[index]))]
        phantoms = {key: size for piece in pieces for key, size in piece.phantoms.items()}
        wants_grad = any(name in runner.grad_names for name in node.outputs)
        if known is None:
            known = self._measure(key, index, wants_grad, storages, phantoms, differs)
        state.graphs.pop(index, None)
        class_id, cost, fwd_overhead, bwd_overhead, _ = known
        saved = dict.fromkeys(
            view.name for piece in pieces for view in piece.layout.saved if view is not None
        )
        state_bytes = sum(storage_bytes(state.external[n]) for n in runner.volatile[index])
        if node.is_random:
            state_bytes += state.rng.pop(index).size_bytes
        state.buffers.pop(index, None)
        return NodeFacts(
            cost=cost,
            storages=storages,
            saved=tuple(saved),
            phantom_bytes=sum(phantoms.values()),
            state_bytes=state_bytes,
            wants_grad=wants_grad,
            outside=outside,
            fwd_overhead_bytes=fwd_overhead,
            bwd_overhead_bytes=bwd_overhead,
            class_id=class_id,
        )

    def _storages(self, index: int) -> tuple[StorageFacts, ...]:
        groups: dict[int, list[str]] = {}
        for name in self.runner.graph.nodes[index].outputs:
            key = storage_id(self.state.values[name])
            if key not in self.resident:
                groups.setdefault(key, []).append(name)
        return tuple(
            StorageFacts(tuple(names), storage_bytes(self.state.values[names[0]]))
            for names in groups.values()
        )

    def _measure(
        self,
        key: str,
        index: int,
        wants_grad: bool,
        storages: tuple[StorageFacts, ...],
        phantoms: Mapping[int, int],
        differs: bool,
    ) -> tuple[int, Cost, int, int, bool]:
        runner, state = self.runner, self.state
        node = runner.graph.nodes[index]
        if isinstance(self.source, KnownCosts):
            where = f"'{node.name}' ({node.module_path or 'root'}, {node.main.source})"
            self.costs[key] = (len(self.costs), *self.source.lookup(key, where), differs)
            return self.costs[key]
        outputs = [n for n in node.outputs if n in runner.grad_names]

        def prepare() -> None:
            state.graphs.pop(index, None)
            state.grads.clear()
            state.grad_parts.clear()

        def forward() -> None:
            runner.forward(index, state, record=wants_grad, keep_state=False)

        gradients = {name: torch.ones_like(state.values[name]) for name in outputs}

        def backward() -> None:
            state.grads.update(gradients)
            state.borrowed = {storage_id(t) for t in gradients.values()}
            runner.backward(index, state)
            state.grads.clear()
            state.grad_parts.clear()

        made = sum(s.size_bytes for s in storages)
        read = sum(storage_bytes(state.values[n]) for n in node.inputs)
        cost = self.source(prepare, forward, backward if outputs else None, made + read)
        fwd_overhead = bwd_overhead = 0
        if self.measure_memory:
            prepare()
            left = made + sum(phantoms.values())
            fwd_overhead, bwd_overhead = self._overheads(forward, backward, bool(outputs), left)
        prepare()
        state.borrowed = set()
        self.costs[key] = (len(self.costs), cost, fwd_overhead, bwd_overhead, differs)
        return self.costs[key]

    def _overheads(
        self,
        forward: Callable[[], None],
        backward: Callable[[], None],
        has_backward: bool,
        left_bytes: int,
    ) -> tuple[int, int]:
        def run(span: Any) -> None:
            with span("forward"):
                forward()
            if has_backward:
                with span("backward"):
                    backward()

        spans: dict[str, SpanMemory] = {
            span.name: span for span in trace_memory(run, self.runner.device).spans
        }
        # The old outputs are replaced by equal ones at the end: what is above is temporary.
        fwd = max(0, spans["forward"].added_peak_bytes - left_bytes)
        return fwd, spans["backward"].added_peak_bytes if has_backward else 0
