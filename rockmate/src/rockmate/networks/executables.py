"""Compile the program of a plan to an `Executable`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rkgb.costs import Measured, call_kind, op_key
from rkgb.elements import Op
from rkgb.engine import compile_step, lower_step, operations, plain_callee
from rkgb.graphs import SimplifiedGraph
from rkgb.run import single_places, waiting_places, without_idle_steps
from rockmate.networks.network import Network
from rockmate.runtime.executable import Executable
from rockmate.runtime.gradients.rails import fired_in_order
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.plan import Plan
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Step


def without_reruns(network: Network, plan: Plan) -> Plan:
    """Return the plan without recomputations of nodes whose results are kept anyway."""
    count = len(network.problem.nodes)
    steps = tuple(
        step
        for place, step in enumerate(plan.steps)
        if place < count or step.kind != "F" or step.node not in network.fixed
    )
    if len(steps) == len(plan.steps):
        return plan
    timeline = simulate(network.problem, steps)
    return replace(
        plan, steps=steps, peak_bytes=timeline.peak_bytes, overhead_ms=timeline.overhead_ms
    )


def planned_executable(network: Network, plan: Plan) -> Executable:
    """Compile the program of a plan."""
    steps = tuple(Step(*step) for step in without_idle_steps(network.graph, plan.steps))
    return executable(
        network.graph,
        steps,
        network.measured,
        spare_bytes=spare_bytes_of(network, steps),
        room_bytes=plan.budget_bytes - plan.peak_bytes,
    )


def spare_bytes_of(network: Network, steps: Sequence[Step]) -> list[int]:
    """Return the headroom of each step for waiting gradients.

    They must not raise the predicted peaks, in blocks and in requested bytes.
    """
    problems = {id(problem): problem for problem in (network.problem, network.asked)}
    timelines = [simulate(problem, steps) for problem in problems.values()]
    rooms = ([line.peak_bytes - during for during in line.peak_during] for line in timelines)
    return [min(room) for room in zip(*rooms, strict=True)]


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
) -> Executable:
    """Compile the program of some steps.

    For other gradients, `like` gives the places of hand-overs. Without it, `spare_bytes` is the
    headroom of each step within the predicted peak, and hooks on leaves may take `room_bytes` more.
    """
    infos, chosen = graph.dataflow.infos, measured.callees
    alike = {call_kind(key): callee for key, callee in chosen.items()}
    keys = {op.name: op_key(op, infos) for op in operations(graph)}

    def callee(op: Op) -> Callable[..., Any]:
        key = keys.get(op.name, "")
        if key in chosen:
            return chosen[key]
        # Gradients of another backward differ in strides, which bindings do not depend on.
        is_plain = not op.flags and getattr(op.target, "namespace", "") == "aten"
        return (alike.get(call_kind(key)) if is_plain else None) or plain_callee(op)

    lower = partial(lower_step, graph, steps)
    if like is not None:
        places, singles = like.places, like.singles
    else:
        places = waiting_places(graph, steps, spare_bytes)
        places = fired_in_order(places, graph.dataflow.basic.edges)
        singles = single_places(graph, steps, [room_bytes + spare for spare in spare_bytes])
    compiled = compile_step(graph, lower(places), callee)
    return Executable(graph, compiled, places, singles, lower)
