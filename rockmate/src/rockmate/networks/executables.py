"""Compile the program of a plan, as what a step runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rkgb.costs import Measured, call_kind, op_key
from rkgb.elements import Op
from rkgb.engine import compile_step, lower_step, operations, plain_callee
from rkgb.graphs import SimplifiedGraph
from rkgb.run import without_idle_steps
from rockmate.networks.network import Network
from rockmate.runtime.executable import Executable
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.plan import Plan
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Step


def without_reruns(network: Network, plan: Plan) -> Plan:
    """Return the plan without running nodes again whose results are kept anyway."""
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
        network.graph, steps, network.measured, spare_bytes=spare_bytes_of(network, steps)
    )


def spare_bytes_of(network: Network, steps: Sequence[Step]) -> list[int]:
    """Return how much gradients that wait may take in each step.

    They must not move a peak that was predicted: in blocks, and as asked for.
    """
    problems = {id(problem): problem for problem in (network.problem, network.asked)}
    timelines = [simulate(problem, steps) for problem in problems.values()]
    rooms = ([line.peak_bytes - during for during in line.peak_during] for line in timelines)
    return [min(room) for room in zip(*rooms, strict=True)]


def spare_with_fewer(network: Network, plan: Plan, steps: Sequence[Any]) -> list[int]:
    """Return the same for the steps of fewer gradients, which are some of the plan's.

    Each needs what it needs in the plan, at most. A step that the plan has not lets nothing wait.
    """
    planned = tuple(Step(*step) for step in without_idle_steps(network.graph, plan.steps))
    spare = spare_bytes_of(network, planned)
    found: list[int] = []
    begin = 0  # of what has not been met yet: a forward may run several times
    for step in steps:
        try:
            place = planned.index(Step(*step), begin)
        except ValueError:
            found.append(0)
        else:
            found.append(spare[place])
            begin = place + 1
    return found


def unplanned_executable(network: Network) -> Executable:
    """Compile the program that keeps everything: no budget, nothing run again."""
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
    leaves: tuple[str, ...] = (),
    spare_bytes: Sequence[int] = (),
) -> Executable:
    """Compile the program of some steps; `leaves` are those of every kind of backward.

    `spare_bytes` says for each step how much more memory may be in use during it.
    """
    infos, chosen = graph.dataflow.infos, measured.callees
    alike = {call_kind(key): callee for key, callee in chosen.items()}
    keys = {op.name: op_key(op, infos) for op in operations(graph)}

    def callee(op: Op) -> Callable[..., Any]:
        key = keys.get(op.name, "")
        if key in chosen:
            return chosen[key]
        # Another backward has gradients of other strides, which bindings do not look at.
        is_plain = not op.flags and getattr(op.target, "namespace", "") == "aten"
        return (alike.get(call_kind(key)) if is_plain else None) or plain_callee(op)

    compiled = compile_step(graph, lower_step(graph, steps, spare_bytes), callee)
    return Executable(graph, compiled, leaves or leaves_of(graph))


def leaves_of(graph: SimplifiedGraph) -> tuple[str, ...]:
    """Return the leaf of each part of a gradient that the backward of a graph hands over."""
    return tuple(h.leaf for node in graph.nodes for h in node.hand_overs)
