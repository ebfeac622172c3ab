"""The time of every kind of operation: the least of several rounds, in which each is visited.

A busy machine only ever makes a call slower, so the least is the time, and what two rounds agree on
is not measured again. Where other programs take the cores away in the middle of most calls, the
least is no longer near: then each call runs on one thread, and what counts is the time that this
thread had a core.
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
from rkgb.torch_api.torch_private import set_grad_mode

_log = logging.getLogger("rkgb")
# Where calls waited for a core for more than this share of their time, others use the machine.
_BUSY = 0.15


@dataclass(frozen=True)
class Timing:
    """When the rounds of measuring end.

    Every kind is visited in the first rounds. A kind is sure when its two least visits agree; only
    the others are visited again. Kinds of long calls take nearly all the time and are hardly
    disturbed by what ran before: there one call makes a later visit.
    """

    min_rounds: int = 3
    max_rounds: int = 12
    visit_ms: float = 0.3  # a kind is called again within a visit until it has run so long
    most_calls: int = 8
    long_ms: float = 2.0  # of a kind that takes so long, each later visit is one call
    tolerance: float = 0.05  # two visits agree that differ by no more
    patience_ms: float = 2500.0  # then what is not sure stays so: planning cannot wait for silence


@dataclass
class Bench:
    """One kind of operation, ready to be called."""

    op: Op
    basic: BasicGraph
    external: Mapping[str, Tensor]
    grad_mode: bool  # on in a forward, off in a backward: some kernels are chosen by it
    chosen: Mapping[str, int]  # how many elements of a mask are true, where that decides sizes
    drawn: Drawn | None  # fills floating point; None for one number everywhere, which is faster
    written: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.written = frozenset(self.op.writes)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return fresh arguments for one call."""
        basic = self.basic
        found = StandIns(
            *(basic.infos, basic.device, self.external, self.written, self.chosen),
            drawn=self.drawn,
        )
        value = found.__getitem__
        return map_refs(self.op.args, value), map_refs(dict(self.op.kwargs), value)


@dataclass(frozen=True)
class _Visit:
    """The least that calls took, and how much of all their time they waited for a core."""

    least: CallTime
    spent_ms: float
    waited_ms: float


def rounds(
    benches: Mapping[str, Bench],
    callees: Mapping[str, Callable[..., Any]],
    device: Device,
    timing: Timing,
) -> tuple[dict[str, CallTime], float]:
    """Return the time of each kind, and how far the second least times are above the least."""
    first = {key: _visit(bench, callees[key], device, timing) for key, bench in benches.items()}
    spent = sum(visit.spent_ms for visit in first.values())
    waited = sum(visit.waited_ms for visit in first.values())
    with contextlib.ExitStack() as stack:
        if waited > _BUSY * spent:
            _log.info(
                "other programs use this machine (calls waited %.0f %% of their time for a core): "
                "costs are what one thread takes",
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
        "%d kinds of operation, %d of them not sure, times sure to %.1f %%",
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
        if turn or is_long:  # else the first call of a visit warms the caches
            least, host = min(least, took.device_ms), min(host, took.host_ms)
            if spent > timing.visit_ms:
                break
    return _Visit(CallTime(least, host), spent, waited)
