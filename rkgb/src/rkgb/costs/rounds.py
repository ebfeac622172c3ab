"""The time of every kind of operation: the minimum over several rounds, which visit every kind.

A busy machine only makes a call slower, so the minimum is the time. A kind on which two rounds
agree is not measured again. If other programs interrupt most calls, even the minimum is too high.
Then each call runs on one thread, and its time is the time in which this thread had a core.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from rkgb.device.base import CallTime, Device
from rkgb.elements.op import Op, map_refs
from rkgb.graphs.basic import BasicGraph
from rkgb.run.stand_ins import Drawn, StandIns
from rkgb.torch_api.private.autograd import set_grad_mode

_log = logging.getLogger("rkgb")
# If calls wait for a core for more than this share of their time, other programs use the machine.
_BUSY = 0.15


@dataclass(frozen=True)
class Timing:
    """When the rounds of measuring end.

    The first rounds visit every kind. A kind is settled when its two least visits agree; later
    rounds visit only the others. Kinds with long calls take nearly all the time and depend little
    on what ran before, so a later visit to them is one call.
    """

    min_rounds: int = 3
    max_rounds: int = 12
    visit_ms: float = 0.3  # a visit repeats the call until it has run so long
    most_calls: int = 8
    long_ms: float = 2.0  # a call that takes longer is long
    tolerance: float = 0.05  # two visits agree if they differ by no more
    patience_ms: float = 2500.0  # no round begins after this, whatever is not settled


@dataclass
class Bench:
    """One kind of operation, ready to be called."""

    op: Op
    basic: BasicGraph
    external: Mapping[str, Tensor]
    grad_mode: bool  # on in a forward, off in a backward: it decides between some kernels
    chosen: Mapping[str, int]  # number of true elements of masks that decide sizes
    drawn: Drawn | None  # fills floating-point tensors; None: with a constant, which is faster
    written: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.written = frozenset(self.op.writes)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return fresh arguments for one call."""
        basic = self.basic
        found = StandIns(
            *(basic.infos, basic.device, self.external, self.written, self.chosen), drawn=self.drawn
        )
        value = found.__getitem__
        return map_refs(self.op.args, value), map_refs(dict(self.op.kwargs), value)


@dataclass(frozen=True)
class _Visit:
    """The least time of a call, the time of all calls, and their waiting for a core."""

    least: CallTime
    spent_ms: float
    waited_ms: float


def rounds(
    benches: Mapping[str, Bench],
    callees: Mapping[str, Callable[..., Any]],
    device: Device,
    timing: Timing,
) -> tuple[dict[str, CallTime], float]:
    """Return the time of each kind, and by which fraction the second least times exceed it."""
    first = {key: _visit(bench, callees[key], device, timing) for key, bench in benches.items()}
    spent = sum(visit.spent_ms for visit in first.values())
    waited = sum(visit.waited_ms for visit in first.values())
    with contextlib.ExitStack() as stack:
        if waited > _BUSY * spent:
            _log.info(
                "other programs use this machine (calls waited %.0f %% of their time for a core): "
                "costs are measured on one thread",
                100 * waited / spent,
            )
            stack.enter_context(device.counting_own_time())
            first = {}
        return _more_rounds(benches, callees, device, timing, first)


def _more_rounds(
    benches: Mapping[str, Bench],
    callees: Mapping[str, Callable[..., Any]],
    device: Device,
    timing: Timing,
    first: Mapping[str, _Visit],
) -> tuple[dict[str, CallTime], float]:
    inf = float("inf")
    least = {key: first[key].least.device_ms if key in first else inf for key in benches}
    host = {key: first[key].least.host_ms if key in first else inf for key in benches}
    second = dict.fromkeys(benches, inf)
    unsure: Collection[str] = list(benches)
    began = time.perf_counter()
    for turn in range(1 if first else 0, timing.max_rounds):
        if turn >= timing.min_rounds:
            unsure = [key for key in unsure if second[key] > least[key] * (1 + timing.tolerance)]
            late = (time.perf_counter() - began) * 1e3 > timing.patience_ms
            if not unsure or late:
                break
        for key in unsure:
            is_long = timing.long_ms < least[key] < inf
            visit = _visit(benches[key], callees[key], device, timing, is_long=is_long).least
            host[key] = min(host[key], visit.host_ms)
            second[key] = min(second[key], max(least[key], visit.device_ms))
            least[key] = min(least[key], visit.device_ms)
    total = sum(least.values())
    known = timing.max_rounds > 1 and total
    spread = (sum(second.values()) - total) / total if known else 0.0
    sure = sum(second[key] <= least[key] * (1 + timing.tolerance) for key in benches)
    _log.debug(
        "%d kinds of operation, %d of them not settled, spread of times %.1f %%",
        len(benches),
        len(benches) - sure,
        100 * spread,
    )
    return {key: CallTime(least[key], host[key]) for key in benches}, spread


def _visit(
    bench: Bench,
    callee: Callable[..., Any],
    device: Device,
    timing: Timing,
    *,
    is_long: bool = False,
) -> _Visit:
    args, kwargs = bench.arguments()
    least = host = float("inf")
    spent = waited = 0.0
    for turn in range(timing.most_calls):
        if bench.written and turn:
            args, kwargs = bench.arguments()
        set_grad_mode(bench.grad_mode)
        took = device.time(partial(callee, *args, **kwargs))
        set_grad_mode(False)
        spent, waited = spent + took.device_ms, waited + took.waited_ms
        if turn or is_long:  # otherwise the first call only warms the caches
            least, host = min(least, took.device_ms), min(host, took.host_ms)
            if spent > timing.visit_ms:
                break
    return _Visit(CallTime(least, host), spent, waited)
