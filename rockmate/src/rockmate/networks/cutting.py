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
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from torch import Tensor, nn

from rkgb.costs import Timing
from rkgb.engine import B_to_D, D_to_S, Sample, external_values, operations, runnable
from rkgb.graphs import PLANNED_PASSES, BasicGraph, SimplifiedGraph
from rockmate.errors import InfeasibleBudgetError
from rockmate.networks.keeping import measured_too
from rockmate.networks.network import Network, assembled
from rockmate.problems.problem import Problem
from rockmate.schedules.plan import Plan
from rockmate.schedules.report import format_bytes
from rockmate.settings import Terms
from rockmate.solvers.least_budget import step_floors

if TYPE_CHECKING:
    from rkgb.compiled import CompiledGraph
    from rkgb.rows import BitsOfPieces, Cut, CutGraph, CutNode

_log = logging.getLogger("rockmate")
COUNTS = (2, 4, 8, 16, 32)
_ONE_VISIT = Timing(min_rounds=1, max_rounds=1)
MakePlan = Callable[[Problem], Plan]


@dataclass(frozen=True)
class _Part:
    """What is cut: so many of the widest parts (None: all), and the largest steps."""

    widest: int | None
    steps: bool = False


class OfProblem(Protocol):
    """A step with the problem of planning it."""

    @property
    def problem(self) -> Problem: ...


AnyStep = TypeVar("AnyStep", bound=OfProblem)


@dataclass
class Cutting(Generic[AnyStep]):
    """A step, and versions of it with parts in pieces of rows, which `make` makes.

    Times of pieces are measured (`times`) only where bytes fit, or else never.
    """

    whole: AnyStep
    basic: BasicGraph
    make: Callable[[CutGraph, bool], AnyStep]
    times: bool
    same_bits: BitsOfPieces | None = None
    # Of a compiled step: the recorded nodes that each of its nodes consists of.
    recorded: Sequence[Sequence[int]] | None = None
    _made: dict[tuple[int, _Part, bool], AnyStep | None] = field(default_factory=dict)
    _tried: set[tuple[int, tuple[CutNode, ...], bool]] = field(default_factory=set)

    def chosen(self, planner: MakePlan) -> tuple[AnyStep, Plan]:
        """Return the fastest plan with its step.

        Raises:
            InfeasibleBudgetError: no plan fits with or without pieces; the error names both minima.
        """
        best: tuple[AnyStep, Plan] | None = None
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
                    step = self._step(count, part, times=False)
                    if step is None:
                        continue
                    plan = planner(step.problem)
                    if self.times:
                        step = self._step(count, part, times=True)
                        assert step is not None
                        plan = planner(step.problem)
                except InfeasibleBudgetError as error:
                    if least is None or error.minimum_bytes < least.minimum_bytes:
                        least = error
                    continue
                plan = beside(plan, self.whole.problem.base_time_ms)
                if best is None or plan.time_ms < best[1].time_ms:
                    best = step, plan
                if before is not None and plan.time_ms > before:
                    break
                before = plan.time_ms
        if best is not None:
            return best
        assert refusal is not None
        raise _refused(refusal, least)

    def every(self) -> dict[Hashable, AnyStep]:
        """Return the step in each number of pieces, by how it is cut."""
        found: dict[Hashable, AnyStep] = {}
        for part in (_Part(None), _Part(None, steps=True)):
            for count in () if found else COUNTS:
                step = self._step(count, part, times=self.times)
                if step is not None:
                    found[self._how(count, part)] = step
        return found

    def cut_as(self, how: Any) -> AnyStep:
        """Return the step in these pieces; times are not measured."""
        return self.make(self._cut_graph(how), False)

    def _step(self, count: int, part: _Part, *, times: bool) -> AnyStep | None:
        """Return the step with `count` pieces, or None if nothing new can be cut like this."""
        key = (count, part, times)
        if key not in self._made:
            self._made[key] = self._cut(count, part, times=times)
        return self._made[key]

    def _how(self, count: int, part: _Part) -> Cut:
        from rkgb.rows import Cut

        alone = self._largest_steps if part.steps else ()
        return Cut(count, part.widest, alone, self.same_bits is not None)

    def _cut(self, count: int, part: _Part, *, times: bool) -> AnyStep | None:
        cut = self._cut_graph(self._how(count, part))
        same = (count, cut.nodes, times)
        if not cut.nodes or same in self._tried:
            _log.debug("nothing is cut in %d pieces: %s", count, "; ".join(cut.refused))
            return None
        self._tried.add(same)
        return self.make(cut, times)

    def _cut_graph(self, how: Cut) -> CutGraph:
        from rkgb.rows import cut_in_rows

        is_compiled = self.recorded is not None
        return cut_in_rows(B_to_D(self.basic), how, self.same_bits, is_compiled=is_compiled)

    @cached_property
    def _largest_steps(self) -> tuple[int, ...]:
        """The nodes that alone take more than half of what the largest takes, the largest first.

        A cut in many pieces saves about half, as what enters and leaves stays.
        """
        floors = sorted(step_floors(self.whole.problem), reverse=True)
        large = dict.fromkeys(node for size, _, node in floors if 2 * size > floors[0][0])
        if self.recorded is None:
            return tuple(large)
        return tuple(node for compiled in large for node in self.recorded[compiled])


def cutting_of(
    whole: Network, basic: BasicGraph, model: nn.Module, sample: Sample, settings: Terms
) -> Cutting[Network]:
    """Return the ways to cut a measured network."""
    flops = settings.cost == "flops"
    external = external_values(basic, model, sample.leaves)
    same_bits = None
    if settings.split == "exact":
        from rkgb.rows import BitsOfPieces

        same_bits = BitsOfPieces(basic, external)

    def make(cut: CutGraph, times: bool) -> Network:
        compiled = _compiled_around(cut, same_bits) if settings.compile else None
        recorded = runnable((compiled or cut).graph)
        graph, known = recorded.graph, whole.measured
        external = external_values(graph.basic, model, sample.leaves)
        measured = measured_too(known, graph, external, times=times, timing=_ONE_VISIT)
        if flops:
            measured = measured.by_flops(graph.basic, operations(graph))
        network = assembled(graph, recorded, measured, external, compiled, whole.coming)
        return replace(network, cut=cut)

    recorded = None if whole.compiled is None else _recorded_nodes(whole.compiled, basic)
    return Cutting(whole, basic, make, not flops, same_bits, recorded)


def _recorded_nodes(compiled: CompiledGraph, basic: BasicGraph) -> list[list[int]]:
    plain = D_to_S(B_to_D(basic), passes=PLANNED_PASSES)
    home = {place: i for i, node in enumerate(plain.nodes) for place in node.positions}
    nodes = compiled.graph.nodes
    return [list(dict.fromkeys(map(home.__getitem__, node.positions))) for node in nodes]


def _compiled_around(cut: CutGraph, same_bits: BitsOfPieces | None) -> CompiledGraph:
    """Compile what does not run in pieces of rows."""
    from rkgb.compiled import Apart, compile_pieces

    def put_into(merged: SimplifiedGraph) -> SimplifiedGraph:
        return cut.in_graph(merged, same_bits).graph

    nodes = [node.index for node in cut.nodes]
    apart = Apart(cut.graph, nodes, "runs in pieces of rows", put_into)
    return compile_pieces(cut.merged.dataflow, apart=apart)


def beside(plan: Plan, whole_ms: float) -> Plan:
    """Return a plan of pieces that counts as extra time what they take beside the whole.

    What was proven was of these pieces only.
    """
    extra_ms = plan.time_ms - whole_ms
    made = replace(plan, base_time_ms=whole_ms, overhead_ms=extra_ms)
    return replace(made, bound_ms=None, status="feasible")


def cut_again(how: Cut, basic: BasicGraph, external: Mapping[str, Tensor]) -> CutGraph:
    """Return another recording cut in the same way."""
    from rkgb.rows import BitsOfPieces, cut_in_rows

    same = BitsOfPieces(basic, external) if how.is_exact else None
    return cut_in_rows(B_to_D(basic), how, same)


def _refused(
    whole: InfeasibleBudgetError, cut: InfeasibleBudgetError | None
) -> InfeasibleBudgetError:
    if cut is None:
        return whole.reworded(f"{_sentence(whole)} Nothing of it can be cut in pieces of rows.")
    return whole.reworded(
        f"{_sentence(cut)} That is with its widest parts in pieces of rows; without, the smallest "
        f"budget is {format_bytes(whole.minimum_bytes)} ({whole.minimum_bytes} bytes).",
        minimum_bytes=min(whole.minimum_bytes, cut.minimum_bytes),
        bound_bytes=min(whole.bound_bytes, cut.bound_bytes),
    )


def _sentence(error: InfeasibleBudgetError) -> str:
    return f"{str(error).rstrip('.')}."
