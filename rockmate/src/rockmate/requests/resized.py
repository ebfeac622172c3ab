"""Plans derived from known ones, for recordings that differ only in numbers or only in sizes.

Where only numbers differ, the steps of the known plan serve. A plan for other sizes takes the time
of a few steps.

The recording is a real one, so the program is exact and its bytes are known. The steps are derived
from plans for other sizes (`planners.replan`) instead of a search. The step is not compared with
plain PyTorch again, because a step with the same operations was. If the allocator has blocks, one
planned step is run beforehand to measure them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rkgb.device import no_collection
from rkgb.graphs import same_but_for_numbers, same_but_for_sizes
from rkgb.guards import nothing_watched
from rkgb.run import RunnableGraph
from rockmate.errors import InfeasibleBudgetError
from rockmate.networks.executables import without_reruns
from rockmate.networks.network import network_of
from rockmate.networks.planned import Planned, compiled_plan, with_other_numbers
from rockmate.options.options import KnownBlocks
from rockmate.planners.module_options import plan_keeping, replan_keeping
from rockmate.problems.problem import Problem
from rockmate.progress import stopwatch
from rockmate.requests.anew import has_blocks, within_blocks
from rockmate.requests.request import Request, first_of, tested
from rockmate.requests.versions import ExpectedKind, Version, has_same_nodes, versions_like
from rockmate.schedules.plan import Plan
from rockmate.settings import Terms, parse_budget


def resized(request: Request) -> Planned | None:
    """Return a plan derived from known ones, or None."""
    model, sample, settings = request.model, request.sample, request.settings
    known, recorded, phases = request.known, request.recorded, request.phases
    like = _same_in_other_sizes(known, recorded)
    if like is None or not can_be_resized(settings):
        return None
    alike = [other for other in known if other.family is like.planned.family]
    old = like.planned.network
    network = network_of(model, recorded, sample, settings, phases, like=(old.measured, like.graph))
    budget_bytes, _ = parse_budget(settings.budget)
    assert budget_bytes is not None
    pairs = [(other.problem, other.plan.steps) for other in alike]
    is_foreseen = like.graph is not old.graph or like.planned.other_gradients is not None

    def make(within_bytes: int, blocks_bytes: int) -> Planned:
        room_bytes = within_bytes - settings.reserve - blocks_bytes
        with phases.phase("planning"), nothing_watched(), stopwatch() as parts:
            most = settings.most_kept_bytes
            plan = replan_keeping(network.problem, room_bytes, pairs, request.blocks, most)
        phases.seconds.update(parts)
        if plan is None:
            raise _NothingFollowsError
        plan = without_reruns(network, plan)
        with phases.phase("compilation"):
            planned = compiled_plan(network, plan, sample, budget_bytes, phases)
        planned = replace(
            planned,
            how="resized",
            family=like.planned.family,
            most_kept_bytes=settings.most_kept_bytes,
            blocks_bytes=blocks_bytes,
        )
        return _planning_for_others(planned, request) if is_foreseen else planned

    try:
        if not (settings.self_test and has_blocks(sample)):
            return make(budget_bytes, 0)
        aside_bytes = like.planned.blocks_bytes
        attempt = partial(tested, request, None)
        return within_blocks(make, attempt, model, sample, budget_bytes, aside_bytes)
    except (_NothingFollowsError, InfeasibleBudgetError):
        return None


class _NothingFollowsError(Exception):
    """No plan for another size leads to one here."""


def can_be_resized(settings: Terms) -> bool:
    """Return whether plans may be derived for other sizes: not while the budget is a fraction."""
    budget_bytes, _ = parse_budget(settings.budget)
    return budget_bytes is not None


def _planned_anew(
    effort: str | float,
    blocks: KnownBlocks,
    problem: Problem,
    room_bytes: int,
    most_kept_bytes: int | None,
) -> Plan:
    """Return a plan for the same sizes and other gradients.

    Raises:
        InfeasibleBudgetError: there is none.
    """
    with nothing_watched():
        plan = replan_keeping(problem, room_bytes, [], blocks, most_kept_bytes)
        return plan or plan_keeping(problem, room_bytes, most_kept_bytes, effort=effort)


def ready_for_others(planned: Planned, request: Request) -> Planned:
    """Return a plan that is extended so that other gradients may also arrive."""
    kind = planned.network.basic.kind
    in_pieces = planned.network.has_pieces and not kind.is_of_losses_alone
    if planned.other_gradients is not None or in_pieces:
        return planned
    planned = replace(planned, most_kept_bytes=request.settings.most_kept_bytes)
    return _planning_for_others(planned, request)


def _planning_for_others(planned: Planned, request: Request) -> Planned:
    anew = partial(_planned_anew, request.settings.effort, request.blocks)
    return replace(planned, other_gradients=anew)


def _same_in_other_sizes(known: Sequence[Planned], recorded: RunnableGraph) -> Version | None:
    """Return a version of a known plan whose recording differs only in sizes, or None."""
    seen: list[object] = []
    for version in versions_like(known, recorded.graph.basic):
        if any(version.planned.family is family for family in seen):
            continue
        seen.append(version.planned.family)
        ours, theirs = recorded.graph, version.graph
        if same_but_for_sizes(ours.basic, theirs.basic) and has_same_nodes(ours, theirs):
            return version
    return None


def other_numbers(request: Request) -> Planned | None:
    """Use the steps of a known plan for a recording that differs only in numbers."""
    basic = request.recorded.graph.basic
    for version in versions_like(request.known, basic):
        if version.is_apart:
            continue
        known, cut = version.graph, version.planned.network.cut
        cut, recorded = request.cut(None if cut is None else cut.how)
        same = same_but_for_numbers(recorded.graph.basic, known.basic)
        if same and has_same_nodes(recorded.graph, known):
            planned = with_other_numbers(
                *(version.planned, known, recorded, request.sample, request.phases), cut=cut
            )
            request.phases.close("planned before")
            return planned
    return None


def other_sizes(request: Request) -> Planned | None:
    """Derive a plan from known ones for a recording that differs only in sizes."""
    with no_collection():
        planned = resized(request)
    if planned is not None:
        request.phases.close("planned before")
    return planned


def expected_gradients(request: Request) -> Planned | None:
    """Derive a plan from known ones for the unusual gradients that arrived last."""
    if not can_be_resized(request.settings):
        return None
    expected = ExpectedKind.after(request.known)
    if expected is None or expected.is_usual(losses=request.losses):
        return None
    with no_collection():
        return first_of((other_numbers, other_sizes), replace(request, kind=expected))
