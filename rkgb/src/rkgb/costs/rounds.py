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
from dataclasses import dataclass
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

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return fresh arguments for one call."""
        basic = self.basic
        found = StandIns(
            *(basic.infos, basic.device, self.external, self.op.writes, self.chosen),
            drawn=self.drawn,
        )
        value = found.__getitem__
        return map_refs(self.op.args, value), map_refs(dict(self.op.kwargs), value)


@dataclass(frozen=True)
class _Visit:
    """The least time of a call, the time of all calls, and their waiting for a core."""

    least: CallTime
    spent_ms: float
    waited_ms: float


@dataclass(frozen=True)
class Rounds:
    """The rounds of measuring some kinds of operation, each by its function."""

    benches: Mapping[str, Bench]
    callees: Mapping[str, Callable[..., Any]]
    device: Device
    timing: Timing

    def least(self) -> tuple[dict[str, CallTime], float]:
        """Return the time of each kind, and by which fraction the second least times exceed it."""
        first = {key: self._visit(key) for key in self.benches}
        spent = sum(visit.spent_ms for visit in first.values())
        waited = sum(visit.waited_ms for visit in first.values())
        with contextlib.ExitStack() as stack:
            if waited > _BUSY * spent:
                _log.info(
                    "other programs use this machine (calls waited %.0f %% of their time for a "
                    "core): costs are measured on one thread",
                    100 * waited / spent,
                )
                stack.enter_context(self.device.counting_own_time())
                first = {}
            return self._more(first)

    def _more(self, first: Mapping[str, _Visit]) -> tuple[dict[str, CallTime], float]:
        inf, timing = float("inf"), self.timing
        none = _Visit(CallTime(inf, inf), 0.0, 0.0)
        least = {key: first.get(key, none).least.device_ms for key in self.benches}
        host = {key: first.get(key, none).least.host_ms for key in self.benches}
        second = dict.fromkeys(self.benches, inf)
        unsure: Collection[str] = list(self.benches)
        began = time.perf_counter()
        for turn in range(1 if first else 0, timing.max_rounds):
            if turn >= timing.min_rounds:
                unsure = [k for k in unsure if second[k] > least[k] * (1 + timing.tolerance)]
                late = (time.perf_counter() - began) * 1e3 > timing.patience_ms
                if not unsure or late:
                    break
            for key in unsure:
                visit = self._visit(key, is_long=timing.long_ms < least[key] < inf).least
                host[key] = min(host[key], visit.host_ms)
                second[key] = min(second[key], max(least[key], visit.device_ms))
                least[key] = min(least[key], visit.device_ms)
        total = sum(least.values())
        known = timing.max_rounds > 1 and total
        spread = (sum(second.values()) - total) / total if known else 0.0
        sure = sum(second[key] <= least[key] * (1 + timing.tolerance) for key in self.benches)
        _log.debug(
            "%d kinds of operation, %d of them not settled, spread of times %.1f %%",
            *(len(self.benches), len(self.benches) - sure, 100 * spread),
        )
        return {key: CallTime(least[key], host[key]) for key in self.benches}, spread

    def _visit(self, key: str, *, is_long: bool = False) -> _Visit:
        bench, callee = self.benches[key], self.callees[key]
        args, kwargs = bench.arguments()
        least = host = float("inf")
        spent = waited = 0.0
        for turn in range(self.timing.most_calls):
            if bench.op.writes and turn:
                args, kwargs = bench.arguments()
            set_grad_mode(bench.grad_mode)
            took = self.device.time(partial(callee, *args, **kwargs))
            set_grad_mode(False)
            spent, waited = spent + took.device_ms, waited + took.waited_ms
            if turn or is_long:  # otherwise the first call only warms the caches
                least, host = min(least, took.device_ms), min(host, took.host_ms)
                if spent > self.timing.visit_ms:
                    break
        return _Visit(CallTime(least, host), spent, waited)
