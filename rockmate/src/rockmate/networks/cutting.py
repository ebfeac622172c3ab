"""Networks whose largest parts run in pieces of rows, for budgets below the largest operation.

First a plan is made for the step as it is. If it fits without recomputation, nothing is cut.
Otherwise plans are made with the largest part, or all large parts, in 2, 4, 8 … pieces, and the
fastest plan that fits is taken. More pieces take longer, so the search ends once plans get slower.
If none fits, operations that alone take more than the budget are cut, too: what a convolution
allocates while it runs is then allocated for a piece. Measuring the time of many pieces is slow, so
it is measured only if the bytes fit. With `split="exact"`, only pieces are used that give the bits
of the whole on this machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import nn

from rkgb.costs import Timing
from rkgb.engine import B_to_D, Sample, external_values, runnable
from rkgb.graphs import BasicGraph
from rockmate.errors import InfeasibleBudgetError
from rockmate.networks.keeping import measured_too
from rockmate.networks.network import Network, assembled, by_flops
from rockmate.planners.smallest_budget import step_floors
from rockmate.problems.problem import Problem
from rockmate.schedules.plan import Plan
from rockmate.schedules.report import format_bytes

if TYPE_CHECKING:
    from rkgb.rows import BitsOfPieces, CutNode

_log = logging.getLogger("rockmate")
COUNTS = (2, 4, 8, 16, 32)
_ONE_VISIT = Timing(min_rounds=1, max_rounds=1)
Planner = Callable[[Problem], Plan]


@dataclass(frozen=True)
class _Part:
    """What is cut: so many of the widest parts (None: all), and the largest steps."""

    widest: int | None
    steps: bool = False


@dataclass
class Cutting:
    """A network, and versions of it with parts in pieces of rows."""

    whole: Network
    basic: BasicGraph
    model: nn.Module
    sample: Sample
    by_flops: bool
    same_bits: BitsOfPieces | None = None
    _made: dict[tuple[int, _Part, bool], Network | None] = field(default_factory=dict)
    _tried: set[tuple[int, tuple[CutNode, ...], bool]] = field(default_factory=set)

    def chosen(self, planner: Planner) -> tuple[Network, Plan]:
        """Return the fastest plan with its network.

        Raises:
            InfeasibleBudgetError: no plan fits with or without pieces; the error names both minima.
        """
        best: tuple[Network, Plan] | None = None
        refusal: InfeasibleBudgetError | None = None
        try:
            best = self.whole, planner(self.whole.problem)
            if not best[1].overhead_ms:
                return best
        except InfeasibleBudgetError as error:
            refusal = error
        least: InfeasibleBudgetError | None = None
        for part in (_Part(1), _Part(None), _Part(0, steps=True), _Part(None, steps=True)):
            if part.steps and best is not None:
                break
            before = None
            for count in COUNTS:
                try:
                    network = self._network(count, part, times=False)
                    if network is None:
                        continue
                    plan = planner(network.problem)
                    if not self.by_flops:
                        network = self._network(count, part, times=True)
                        assert network is not None
                        plan = planner(network.problem)
                except InfeasibleBudgetError as error:
                    if least is None or error.minimum_bytes < least.minimum_bytes:
                        least = error
                    continue
                plan = self._beside_the_whole(plan)
                if best is None or plan.time_ms < best[1].time_ms:
                    best = network, plan
                if before is not None and plan.time_ms > before:
                    break
                before = plan.time_ms
        if best is not None:
            return best
        assert refusal is not None
        raise _refused(refusal, least)

    def _beside_the_whole(self, plan: Plan) -> Plan:
        """Return a plan of pieces that counts as extra time what runs twice within them.

        What was proven was of these pieces only.
        """
        base_ms = self.whole.problem.base_time_ms
        extra_ms = plan.time_ms - base_ms
        made = replace(plan, base_time_ms=base_ms, overhead_ms=extra_ms)
        return replace(made, bound_ms=None, status="feasible")

    def _network(self, count: int, part: _Part, *, times: bool) -> Network | None:
        """Return the network with `count` pieces, or None if nothing new can be cut like this."""
        key = (count, part, times)
        if key not in self._made:
            self._made[key] = self._cut(count, part, times=times)
        return self._made[key]

    def _cut(self, count: int, part: _Part, *, times: bool) -> Network | None:
        from rkgb.rows import cut_in_rows

        alone = self._largest_steps if part.steps else ()
        cut = cut_in_rows(B_to_D(self.basic), count, part.widest, self.same_bits, alone)
        same = (count, cut.nodes, times)
        if not cut.nodes or same in self._tried:
            _log.debug("nothing is cut in %d pieces: %s", count, "; ".join(cut.refused))
            return None
        self._tried.add(same)
        recorded = runnable(cut.graph)
        basic = recorded.graph.dataflow.basic
        external = external_values(basic, self.model, self.sample.leaves)
        known, timing = self.whole.measured, _ONE_VISIT
        measured = measured_too(known, recorded.graph, external, times=times, timing=timing)
        if self.by_flops:
            measured = replace(measured, costs=by_flops(recorded.graph, measured))
        network = assembled(recorded.graph, recorded, measured, external)
        return replace(network, cut=cut)

    @cached_property
    def _largest_steps(self) -> tuple[int, ...]:
        """The nodes that alone take more than half of what the largest takes, the largest first.

        A cut in many pieces saves about half, as what enters and leaves stays.
        """
        floors = sorted(step_floors(self.whole.problem), reverse=True)
        large = (node for size, _, node in floors if 2 * size > floors[0][0])
        return tuple(dict.fromkeys(large))


def _refused(
    whole: InfeasibleBudgetError, cut: InfeasibleBudgetError | None
) -> InfeasibleBudgetError:
    if cut is None:
        return InfeasibleBudgetError(
            f"{_sentence(whole)} Nothing of it can be cut in pieces of rows.",
            asked_bytes=whole.asked_bytes,
            minimum_bytes=whole.minimum_bytes,
            bound_bytes=whole.bound_bytes,
        )
    return InfeasibleBudgetError(
        f"{_sentence(cut)} That is with its widest parts in pieces of rows; without, the smallest "
        f"budget is {format_bytes(whole.minimum_bytes)} ({whole.minimum_bytes} bytes).",
        asked_bytes=whole.asked_bytes,
        minimum_bytes=min(whole.minimum_bytes, cut.minimum_bytes),
        bound_bytes=min(whole.bound_bytes, cut.bound_bytes),
    )


def _sentence(error: InfeasibleBudgetError) -> str:
    return f"{str(error).rstrip('.')}."
