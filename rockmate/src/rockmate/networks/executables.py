"""Compile the program of a plan to an `Executable`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rkgb.costs import Measured, call_kind, op_key
from rkgb.elements import Op
from rkgb.engine import compile_step, lower_step, operations, plain_callee
from rkgb.graphs import SimplifiedGraph
from rkgb.run import (
    RootMove,
    moves_without_idle_steps,
    single_places,
    waiting_places,
    without_idle_steps,
)
from rockmate.networks.network import Network
from rockmate.networks.offload import Offload
from rockmate.problems.problem import Problem
from rockmate.runtime.executable import Executable
from rockmate.runtime.gradients.rails import fired_in_order
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.moves import Move, Moves, moves_among
from rockmate.schedules.plan import Plan
from rockmate.schedules.simulate import Timeline, simulate
from rockmate.schedules.steps import Step, Steps, first_forwards


def without_reruns(network: Network, plan: Plan) -> Plan:
    """Return the plan without recomputations of nodes whose results are kept anyway."""
    steps, moves = once_where_fixed(network, plan.steps, plan.moves)
    return plan if steps == plan.steps else plan.with_steps(network.problem, steps, moves)


def once_where_fixed(network: Network, steps: Steps, moves: Moves) -> tuple[Steps, Moves]:
    """Return steps in which must-save nodes run once, with their moves."""
    first = first_forwards(steps)
    kept = [
        place
        for place, step in enumerate(steps)
        if first[place] or step.kind != "F" or step.node not in network.fixed
    ]
    return tuple(steps[place] for place in kept), moves_among(moves, kept)


def planned_executable(network: Network, plan: Plan) -> Executable:
    """Compile the program of a plan."""
    steps, moves = steps_of(network, network.graph, plan)
    return executable(
        network.graph,
        steps,
        network.measured,
        spare_bytes=spare_bytes_of(network, steps, moves),
        room_bytes=plan.budget_bytes - plan.peak_bytes,
        moves=moves,
        offload=network.offload,
    )


def steps_of(
    network: Network, graph: SimplifiedGraph, plan: Plan
) -> tuple[tuple[Step, ...], tuple[RootMove, ...]]:
    """Return the steps and moves of a network's plan that a graph needs.

    The graph may be another one than the network's, for other gradients.
    """
    storages = network.problem.storages
    moves = [
        RootMove(storages[m.storage].name, m.out_after, m.gone_after, m.back_before)
        for m in plan.moves
    ]
    steps = tuple(Step(*step) for step in without_idle_steps(graph, plan.steps))
    return steps, moves_without_idle_steps(graph, plan.steps, moves) if moves else ()


def spare_bytes_of(
    network: Network, steps: Sequence[Step], moves: Sequence[RootMove] = ()
) -> list[int]:
    """Return the headroom of each step for waiting gradients.

    They must not raise the predicted peaks, in blocks and in requested bytes.
    """
    problems = {id(problem): problem for problem in (network.problem, network.asked)}
    timelines = [timeline_of(problem, steps, moves) for problem in problems.values()]
    rooms = ([line.peak_bytes - during for during in line.peak_during] for line in timelines)
    return [min(room) for room in zip(*rooms, strict=True)]


def timeline_of(
    problem: Problem, steps: Sequence[Step], moves: Sequence[RootMove] = ()
) -> Timeline:
    """Return the timeline of the steps and moves of a program."""
    place = {storage.name: index for index, storage in enumerate(problem.storages)}
    own = [Move(place[m.root], m.out_after, m.gone_after, m.back_before) for m in moves]
    return simulate(problem, steps, own)


def unplanned_executable(network: Network) -> Executable:
    """Compile the program that keeps everything: no budget, no recomputation."""
    return executable(
        network.graph,
        without_idle_steps(network.graph, no_recomputation(network.problem)),
        network.measured,
    )


def executable(
    graph: SimplifiedGraph,
    steps: Sequence[Any],
    measured: Measured,
    *,
    like: Executable | None = None,
    spare_bytes: Sequence[int] = (),
    room_bytes: int = 0,
    moves: Sequence[RootMove] = (),
    offload: Offload | None = None,
) -> Executable:
    """Compile the program of some steps.

    For other gradients, `like` gives the places of hand-overs. Without it, `spare_bytes` is the
    headroom of each step within the predicted peak, and hooks on leaves may take `room_bytes` more.
    """
    infos, chosen = graph.infos, measured.callees
    alike = {call_kind(key): callee for key, callee in chosen.items()}
    keys = {op.name: op_key(op, infos) for op in operations(graph)}

    def callee(op: Op) -> Callable[..., Any]:
        key = keys.get(op.name, "")
        if key in chosen:
            return chosen[key]
        # Gradients of another backward differ in strides, which bindings do not depend on.
        is_plain = not op.flags and getattr(op.target, "namespace", "") == "aten"
        return (alike.get(call_kind(key)) if is_plain else None) or plain_callee(op)

    lower = partial(lower_step, graph, steps, moves=moves)
    if like is not None:
        places, singles = like.places, like.singles
    else:
        places = waiting_places(graph, steps, spare_bytes)
        places = fired_in_order(places, graph.basic.edges)
        singles = single_places(graph, steps, [room_bytes + spare for spare in spare_bytes])
    copies = None if offload is None else offload.copies
    compiled = compile_step(graph, lower(places), callee, copies)
    return Executable(graph, compiled, places, singles, lower)
