"""Measure every kind of operation: its time in interleaved rounds, its workspace, how to call it.

Each kind runs alone on stand-ins of the recorded shapes and strides (parameters, buffers and inputs
are the real ones), so no network is too large. A busy machine only ever makes a call slower, so the
least of several rounds is the time; what two rounds agree on is not measured again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rkgb.basic import BasicGraph
from rkgb.costs.op_costs import OpCost, count_flops, kinds_of, made_bytes
from rkgb.memory import trace_memory
from rkgb.op import Op, map_refs
from rkgb.rng import RngState
from rkgb.run.bindings import choose_callee
from rkgb.torch_private import set_grad_mode, straight_to_kernels

_log = logging.getLogger("rkgb")


@dataclass(frozen=True)
class Timing:
    """When the rounds of measuring end.

    Every kind is visited in the first rounds. A kind is sure when its two least visits agree; only
    the others are visited again.
    """

    min_rounds: int = 3
    max_rounds: int = 12
    visit_ms: float = 0.3  # a kind is called again within a visit until it has run so long
    most_calls: int = 8
    tolerance: float = 0.05  # two visits agree that differ by no more
    patience_ms: float = 2500.0  # then what is not sure stays so: planning cannot wait for silence


@dataclass(frozen=True)
class Measured:
    """Costs by kind of operation, how to call each, and how sure the times are."""

    costs: Mapping[str, OpCost]
    callees: Mapping[str, Callable[..., Any]]
    spread: float  # how far the second least times are above the least, all kinds together


@dataclass
class _Bench:
    """One kind of operation, ready to be called."""

    op: Op
    basic: BasicGraph
    external: Mapping[str, Tensor]
    grad_mode: bool  # on in a forward, off in a backward: some kernels are chosen by it
    written: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.written = frozenset(self.op.writes)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return fresh arguments for one call."""
        storages: dict[str, Tensor] = {}
        made: dict[str, Tensor] = {}

        def value(name: str) -> Tensor:
            if name not in made:
                made[name] = self._value(name, storages)
            return made[name]

        return map_refs(self.op.args, value), map_refs(dict(self.op.kwargs), value)

    def _value(self, name: str, storages: dict[str, Tensor]) -> Tensor:
        tensor = self.external.get(name)
        if tensor is not None:
            return tensor.detach().clone() if name in self.written else tensor
        info = self.basic.infos[name]
        if info.alias_of not in storages:
            count = info.storage_bytes // info.dtype.itemsize
            made = torch.empty(count, dtype=info.dtype, device=self.basic.device)
            storages[info.alias_of] = _filled(made)
        whole = storages[info.alias_of]
        if whole.dtype != info.dtype:
            whole = _filled(torch.empty_like(whole.view(info.dtype)))
        return whole.as_strided(info.shape, info.stride, info.offset)


def _filled(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.uniform_()  # valid as probabilities, roots and logarithms
    return tensor.zero_()  # valid as indices


def measure(
    basic: BasicGraph,
    ops: Sequence[Op],
    external: Mapping[str, Tensor],
    *,
    times: bool = True,
    timing: Timing | None = None,
) -> Measured:
    """Return what each kind among `ops` costs; without `times`, only workspace and FLOPs.

    The external tensors and the random stream are as before afterwards.
    """
    kinds = kinds_of(basic, ops)
    forward = {op.name for op in basic.ops}
    benches = {key: _Bench(op, basic, external, op.name in forward) for key, op in kinds.items()}
    stream = RngState.save(basic.device)
    try:
        with torch.no_grad(), straight_to_kernels():
            callees = {key: choose_callee(b.op, b.arguments) for key, b in benches.items()}
            workspace = _workspaces(benches, callees, basic)
            least, spread = (
                _rounds(benches, callees, basic.device, timing or Timing())
                if times
                else (dict.fromkeys(kinds, 0.0), 0.0)
            )
    finally:
        stream.restore()
    costs = {
        key: OpCost(least[key], count_flops(op, basic.infos), workspace[key])
        for key, op in kinds.items()
    }
    return Measured(costs, callees, spread)


def _workspaces(
    benches: Mapping[str, _Bench], callees: Mapping[str, Callable[..., Any]], basic: BasicGraph
) -> dict[str, int]:
    order = list(benches)

    def run(span: Any) -> None:
        for key in order:
            for name in ("first", "second"):  # what a library allocates once is not counted
                args, kwargs = benches[key].arguments()
                set_grad_mode(benches[key].grad_mode)
                with span(name):
                    result = callees[key](*args, **kwargs)
                set_grad_mode(False)
                del result, args, kwargs

    spans = trace_memory(run, basic.device).spans[1::2]
    return {
        key: max(0, span.added_peak_bytes - made_bytes(benches[key].op, basic.infos))
        for key, span in zip(order, spans, strict=True)
    }


def _rounds(
    benches: Mapping[str, _Bench],
    callees: Mapping[str, Callable[..., Any]],
    device: torch.device,
    timing: Timing,
) -> tuple[dict[str, float], float]:
    least = dict.fromkeys(benches, float("inf"))
    second = dict.fromkeys(benches, float("inf"))
    unsure = list(benches)
    began = time.perf_counter()
    for turn in range(timing.max_rounds):
        for key in unsure:
            took = _visit(benches[key], callees[key], device, timing)
            second[key] = min(second[key], max(least[key], took))
            least[key] = min(least[key], took)
        if turn + 1 < timing.min_rounds:
            continue
        unsure = [key for key in unsure if second[key] > least[key] * (1 + timing.tolerance)]
        late = (time.perf_counter() - began) * 1e3 > timing.patience_ms
        if not unsure or late:
            break
    total = sum(least.values())
    known = timing.max_rounds > 1 and total
    spread = (sum(second.values()) - total) / total if known else 0.0
    _log.debug(
        "%d kinds of operation, %d of them not sure, times sure to %.1f %%",
        len(benches),
        len(unsure),
        100 * spread,
    )
    return least, spread


def _visit(
    bench: _Bench, callee: Callable[..., Any], device: torch.device, timing: Timing
) -> float:
    args, kwargs = bench.arguments()
    least = spent = float("inf")
    for turn in range(timing.most_calls):
        if bench.written and turn:
            args, kwargs = bench.arguments()
        set_grad_mode(bench.grad_mode)
        took = _time(callee, args, kwargs, device)
        set_grad_mode(False)
        if turn == 0:
            spent = 0.0  # the first call of a visit warms the caches
        else:
            least = min(least, took)
        spent += took
        if turn and spent > timing.visit_ms:
            break
    return least


def _time(
    callee: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
) -> float:
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        callee(*args, **kwargs)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))
    began = time.perf_counter()
    callee(*args, **kwargs)
    return (time.perf_counter() - began) * 1e3
