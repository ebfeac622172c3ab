"""Measure every kind of operation: its time in interleaved rounds, its workspace, how to call it.

Each kind runs alone, on stand-ins of the recorded shapes and strides and on the real parameters,
buffers and inputs. So no network is too large.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rkgb.costs.op_costs import FlopCost, count_flops, kinds_of, made_bytes, op_key
from rkgb.costs.rounds import Bench, Rounds, Timing
from rkgb.device.base import CallTime
from rkgb.device.chosen import device_of, trace_memory
from rkgb.device.rng import drawing_nothing
from rkgb.elements.op import Op, Ref
from rkgb.elements.target import OpCost, target_of
from rkgb.elements.tensor_info import same_values
from rkgb.graphs.basic import BasicGraph
from rkgb.run.bindings import choose_callee
from rkgb.run.stand_ins import Drawn
from rkgb.torch_api.by_values import taking_most
from rkgb.torch_api.private.autograd import set_grad_mode, straight_to_kernels

_log = logging.getLogger("rkgb")
_NOTHING = CallTime(0.0, 0.0)
_FROM_ONE = ("pivots", "LU_pivots", "bag_size")  # arguments of kernels


@dataclass(frozen=True)
class Measured:
    """Costs by kind of operation, how to call each, and the accuracy of the times."""

    costs: Mapping[str, OpCost]
    callees: Mapping[str, Callable[..., Any]]
    spread: float  # by which fraction the second least times exceed the least, all kinds together
    device_ms: float = 0.0  # of the kernels of one step without recomputation
    host_ms: float = 0.0  # of launching them
    unsteady: frozenset[str] = frozenset()  # nondeterministic kinds: other bits at a second call

    @property
    def is_launch_bound(self) -> bool:
        """Whether the device waits for the host; each time is then the larger of the two."""
        return self.host_ms > self.device_ms

    def by_flops(self, basic: BasicGraph, ops: Sequence[Op]) -> Measured:
        """Return the costs of these operations, with times that follow from FLOPs and bytes."""
        source, infos = FlopCost(), basic.infos
        costs = {
            key: replace(self.costs[key], time_ms=source.time_ms(op, infos))
            for key, op in kinds_of(basic, ops).items()
        }
        return replace(self, costs=costs)


def measure(
    basic: BasicGraph,
    ops: Sequence[Op],
    external: Mapping[str, Tensor],
    *,
    times: bool = True,
    timing: Timing | None = None,
    callees: Mapping[str, Callable[..., Any]] | None = None,
    workspaces: Mapping[str, int] | None = None,
) -> Measured:
    """Return what each kind among `ops` costs; without `times`, only workspace and FLOPs.

    `callees` are known functions for kinds; they have already run at these sizes. Known
    `workspaces` are not measured again. The external tensors and the random state are restored.
    """
    every = kinds_of(basic, ops)
    known = {key: cost for key, op in every.items() if (cost := target_of(op).cost(op)) is not None}
    kinds = {key: op for key, op in every.items() if key not in known}
    device = device_of(basic.device)
    differ = times or device.is_asynchronous  # sums in another order must show
    benches = _benches(basic, kinds, external, Drawn() if differ else None)
    with drawing_nothing(basic.device):
        device.warm_up()
        with torch.no_grad(), straight_to_kernels():
            known_ways = callees or {}
            callees = {
                key: known_ways.get(key) or choose_callee(bench.op, bench.arguments)
                for key, bench in benches.items()
            }
            workspace = dict(workspaces or {})
            unknown = {key: bench for key, bench in benches.items() if key not in workspace}
            workspace |= _workspaces(unknown, callees, basic, known_ways)
            unsteady = _unsteady(benches, callees) if device.is_asynchronous else frozenset()
            least, spread = (
                Rounds(benches, callees, device, timing or Timing()).least()
                if times
                else (dict.fromkeys(kinds, _NOTHING), 0.0)
            )
    counts = Counter(op_key(op, basic.infos) for op in ops)
    device_ms = sum(counts[key] * least[key].device_ms for key in kinds)
    host_ms = sum(counts[key] * least[key].host_ms for key in kinds)
    measured = Measured({}, callees, spread, device_ms, host_ms, unsteady)
    times_ms = {key: took.device_ms for key, took in least.items()}
    if device.is_asynchronous and measured.is_launch_bound:
        times_ms = {key: max(took.device_ms, took.host_ms) for key, took in least.items()}
    costs = {
        key: OpCost(times_ms[key], count_flops(op, basic.infos), workspace[key])
        for key, op in kinds.items()
    }
    return replace(measured, costs={**costs, **known})


def choose_callees(
    basic: BasicGraph, ops: Sequence[Op], external: Mapping[str, Tensor]
) -> dict[str, Callable[..., Any]]:
    """Return the function to call for each kind among `ops`, without measuring.

    The external tensors and the random state are restored.
    """
    kinds = {k: op for k, op in kinds_of(basic, ops).items() if target_of(op).cost(op) is None}
    benches = _benches(basic, kinds, external, Drawn())
    with drawing_nothing(basic.device), torch.no_grad(), straight_to_kernels():
        return {key: choose_callee(b.op, b.arguments) for key, b in benches.items()}


def _benches(
    basic: BasicGraph, kinds: Mapping[str, Op], external: Mapping[str, Tensor], drawn: Drawn | None
) -> dict[str, Bench]:
    forward = {op.name for op in basic.ops}
    chosen = {**_true_elements(basic), **_counted_from_one(basic, kinds.values())}
    return {
        key: Bench(op, basic, external, op.name in forward, chosen, drawn)
        for key, op in kinds.items()
    }


def _true_elements(basic: BasicGraph) -> dict[str, int]:
    """Return the number of true elements of each mask for which it was recorded."""
    return {
        basic.infos[name].alias_of: read.value[0][0]
        for read in basic.reads
        if read.kind == "size" and read.op.target is torch.ops.aten.nonzero.default
        for name in read.op.inputs
        if basic.infos[name].dtype in (torch.bool, torch.uint8)
    }


def _counted_from_one(basic: BasicGraph, ops: Iterable[Op]) -> dict[str, int]:
    """Return the storages whose stand-ins are ones: a kernel may refuse zeros, or run away.

    That is pivots of factorisations, and sizes of embedding bags, none of which is empty then.
    """
    found = {}
    for op in ops:
        schema = getattr(op.target, "_schema", None)
        for argument, value in zip(schema.arguments if schema else (), op.args, strict=False):
            if argument.name in _FROM_ONE and isinstance(value, Ref):
                info = basic.infos[value.name]
                found[info.alias_of] = info.storage_bytes // info.dtype.itemsize
    return found


def _workspaces(
    benches: Mapping[str, Bench],
    callees: Mapping[str, Callable[..., Any]],
    basic: BasicGraph,
    ran: Collection[str],
) -> dict[str, int]:
    """Return the workspace of each kind; kinds that `ran` at these sizes need no first call."""
    order = list(benches)
    if not order:
        return {}

    def run(span: Any) -> None:
        for key in order:
            # The first call is not counted: libraries allocate lasting memory in it.
            for name in ("second",) if key in ran else ("first", "second"):
                args, kwargs = benches[key].arguments()
                set_grad_mode(benches[key].grad_mode)
                args = taking_most(benches[key].op.target, args)
                call = _call_once(benches[key].op, callees[key], args, kwargs)
                del args, kwargs
                with span(name):
                    result = call()
                set_grad_mode(False)
                del result, call

    traced = trace_memory(run, basic.device).spans
    spans = [span for span in traced if span.name == "second"]
    found = {}
    for key, span in zip(order, spans, strict=True):
        op = benches[key].op
        beside = span.added_peak_bytes - made_bytes(op, basic.infos)
        # Negative if arguments are freed while results are allocated.
        found[key] = beside if target_of(op).frees else max(0, beside)
    return found


def _call_once(
    op: Op, callee: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any]:
    """Return the call as a step makes it: no one else holds the arguments that it frees."""
    target = target_of(op)
    run = target.run
    if run is None:
        return partial(callee, *args, **kwargs)
    kept = [arg for place, arg in enumerate(args) if place not in target.frees]
    boxed = list(args)

    def call() -> tuple[Any, Any]:
        return run(boxed), kept

    return call


def _unsteady(
    benches: Mapping[str, Bench], callees: Mapping[str, Callable[..., Any]]
) -> frozenset[str]:
    """Return the nondeterministic kinds: other bits for equal arguments, mostly due to atomics."""
    found = set()
    for key, bench in benches.items():
        if bench.op.writes or bench.op.is_random or not bench.op.inputs:
            continue
        args, kwargs = bench.arguments()
        set_grad_mode(bench.grad_mode)
        first, second = (callees[key](*args, **kwargs) for _ in range(2))
        set_grad_mode(False)
        if not _same_bits(first, second):
            found.add(key)
    return frozenset(found)


def _same_bits(first: Any, second: Any) -> bool:
    if isinstance(first, (tuple, list)):
        return all(map(_same_bits, first, second))
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return True
    if first.dtype == torch.uint8:  # a library's workspace for its backward, partly unwritten
        return True
    return same_values(first, second)
