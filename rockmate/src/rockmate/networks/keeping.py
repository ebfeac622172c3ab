"""Compiled pieces that save more for their backward, if that makes a step faster.

A piece recomputes norms and elementwise results in its backward. Its other form saves them: the
bits are the same, the backward is faster, and more bytes live from forward to backward. The first
plan uses the first form, which fits whenever any plan does. Further plans change kinds of pieces to
the other form, in order of gained time per byte, as long as each plan is faster than the last.
Headroom that a plan leaves in the budget goes to further pieces. The simulator checks every choice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, nn

from rkgb.costs import Measured, Timing, op_key
from rkgb.engine import Sample, external_values, measure, operations, runnable
from rkgb.graphs import SimplifiedGraph
from rockmate.errors import InfeasibleBudgetError
from rockmate.networks.network import Network, assembled
from rockmate.problems.problem import Problem
from rockmate.schedules.plan import Plan, make_plan
from rockmate.schedules.simulate import simulate

_LEAST_GAIN = 0.01  # of the time of a piece; less is noise of the measurement
_LEAST_STEP = 0.002  # of the time of a step; for less, no further plan is made


@dataclass
class Keeping:
    """A compiled network, and its pieces' costs in both forms."""

    network: Network
    measured: Measured  # grows: donations of a node depend on what others save
    external: Mapping[str, Tensor]

    def chosen(self, plan: Plan, planner: Callable[[Problem], Plan]) -> tuple[Network, Plan]:
        """Return the fastest plan with its network, after trying pieces that save more.

        In `plan` no piece saves more; `planner` makes other plans within the same budget.
        """
        best = self.filled(self.network, plan)
        kept = self.network.kept
        for nodes in self._kinds():
            if best[0].kept >= self._worth_it:
                break
            kept |= {*nodes}
            network = self._with(kept)
            try:
                found = _plan_of(network, planner(network.problem))
            except InfeasibleBudgetError:
                break
            trial = self.filled(network, found)
            if trial[1].time_ms > best[1].time_ms * (1 - _LEAST_STEP):
                break
            best = trial
        return best

    def filled(self, network: Network, plan: Plan) -> tuple[Network, Plan]:
        """Let more pieces save more, as far as the plan leaves headroom."""
        if not self._worth_it:
            return network, plan
        best = self._trial(plan, (network, plan), self._worth_it)
        if best is not None:
            return best
        best = network, plan
        for nodes in self._kinds():
            before = best
            fit, too_many, count = 0, len(nodes) + 1, len(nodes)
            while too_many - fit > 1:
                trial = self._trial(plan, before, nodes[:count])
                if trial is None:
                    too_many = count
                else:
                    fit, best = count, trial
                count = (fit + too_many) // 2
        return best

    def _trial(
        self, plan: Plan, before: tuple[Network, Plan], nodes: Collection[int]
    ) -> tuple[Network, Plan] | None:
        """Let more nodes save more; return None if that does not fit or gains nothing."""
        network = self._with(before[0].kept | {*nodes})
        if simulate(network.problem, plan.steps).peak_bytes > plan.budget_bytes:
            return None
        found = _plan_of(network, plan)
        return (network, found) if found.time_ms < before[1].time_ms else None

    def _kinds(self) -> list[list[int]]:
        """Return the nodes of each kind, with the largest gain per byte first.

        Within a kind the last nodes come first, because their live ranges are the shortest.
        """
        codes = self.network.compiled.classes if self.network.compiled is not None else ()
        kinds: dict[str, list[int]] = {}
        for index in sorted(self._worth_it, reverse=True):
            kinds.setdefault(codes[index], []).append(index)
        return sorted(kinds.values(), key=lambda nodes: -self._worth(nodes[0]))

    @cached_property
    def _worth_it(self) -> frozenset[int]:
        before = self.network.problem.nodes
        return frozenset(
            index
            for index, gain in self._gains_ms.items()
            if gain > _LEAST_GAIN * (before[index].fwd_time_ms + before[index].bwd_time_ms)
        )

    @cached_property
    def _every(self) -> Network:
        assert self.network.compiled is not None
        return self._with(frozenset(self.network.compiled.keeping))

    @cached_property
    def _gains_ms(self) -> Mapping[int, float]:
        assert self.network.compiled is not None
        before, after = self.network.problem.nodes, self._every.problem.nodes
        return {
            i: before[i].fwd_time_ms
            + before[i].bwd_time_ms
            - after[i].fwd_time_ms
            - after[i].bwd_time_ms
            for i in self.network.compiled.keeping
        }

    def _worth(self, index: int) -> float:
        """Return the milliseconds that a node gains per additional saved byte."""
        kept = [
            sum(s.size_bytes for s in problem.storages if s.producer == index)
            for problem in (self._every.problem, self.network.problem)
        ]
        return self._gains_ms[index] / max(1, kept[0] - kept[1])

    def _with(self, nodes: Collection[int]) -> Network:
        compiled = self.network.compiled
        assert compiled is not None
        recorded = runnable(compiled.with_kept(nodes))
        self.measured = measured_too(self.measured, recorded.graph, self.external)
        own = (recorded.graph, recorded, self.measured, self.external, compiled)
        network = assembled(*own, self.network.coming)
        return replace(network, kept=frozenset(nodes), rebuilding=self.network)


def keeping_of(network: Network, model: nn.Module, sample: Sample) -> Keeping | None:
    """Measure both forms of a network's pieces; return None if there is only one."""
    compiled = network.compiled
    if compiled is None or not compiled.keeping:
        return None
    graph = runnable(compiled.with_kept(compiled.keeping)).graph
    infos = {**network.graph.infos, **graph.infos}
    basic = replace(graph.basic, infos=infos)
    external = external_values(basic, model, sample.leaves)
    nodes = [g.nodes[index] for index in compiled.keeping for g in (network.graph, graph)]
    both = [op for n in nodes for op in (*n.ops, *n.backward)]
    measured = _together(network.measured, measure(basic, both, external))
    own = (network.graph, network.recorded, measured, external, compiled)
    network = assembled(*own, network.coming)
    return Keeping(network, measured, external)


def measured_too(
    known: Measured,
    graph: SimplifiedGraph,
    external: Mapping[str, Tensor],
    *,
    times: bool = True,
    timing: Timing | None = None,
) -> Measured:
    """Return the known costs, extended by measurements of a graph's other kinds of operation."""
    basic = graph.basic
    missing = [op for op in operations(graph) if op_key(op, basic.infos) not in known.costs]
    if not missing:
        return known
    return _together(known, measure(basic, missing, external, times=times, timing=timing))


def _together(known: Measured, more: Measured) -> Measured:
    return replace(
        known,
        costs={**known.costs, **more.costs},
        callees={**known.callees, **more.callees},
        unsteady=known.unsteady | more.unsteady,
    )


def _plan_of(network: Network, plan: Plan) -> Plan:
    """Return the plan of the same steps for a network whose pieces save more."""
    problem = network.problem
    found = make_plan(problem, plan.steps, plan.budget_bytes, plan.planner)
    # Without recomputation nothing is faster. Otherwise the bound was proven for other pieces.
    bound_ms = None if found.overhead_ms else found.base_time_ms
    return replace(
        found,
        tried=plan.tried,
        bound_ms=bound_ms,
        plan_seconds=plan.plan_seconds,
        status="feasible" if found.overhead_ms else plan.status,
    )
