"""A plan for a recording that differs from known ones in sizes only: in the time of a few steps.

The recording is a real one, so the program is exact and its bytes are known. What solvers would
search for follows from the plans for other sizes (`planners.replan`). The step is not tried against
plain PyTorch again: one of the same operations has been.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from rkgb.engine import Sample, device_of
from rkgb.graphs import SimplifiedNode, same_but_for_sizes
from rkgb.run import RunnableGraph
from rockmate import planners
from rockmate.keys.input_signature import InputSignature
from rockmate.options.known_blocks import KnownBlocks
from rockmate.pipeline.network import network_of
from rockmate.pipeline.planned import Planned, planned_executable, without_reruns
from rockmate.planners.module_options import replan_keeping
from rockmate.progress import Phases, stopwatch
from rockmate.runtime.execute import Executor
from rockmate.settings import Settings, parse_budget


def resized(
    known: Sequence[Planned],
    model: nn.Module,
    recorded: RunnableGraph,
    sample: Sample,
    settings: Settings,
    phases: Phases,
    blocks: KnownBlocks,
) -> Planned | None:
    """Return a plan that follows from `known` ones; None where none does.

    A budget that is still a fraction, and a device whose allocator hands out whole blocks (what it
    takes is only seen when it is tried), are for the long way.
    """
    budget_bytes, _ = parse_budget(settings.budget)
    if budget_bytes is None or device_of(sample.device).block_bytes(1) > 1:
        return None
    alike = _family(known, recorded)
    if not alike:
        return None
    network = network_of(model, recorded, sample, settings, phases, like=alike[-1].network)
    with phases.phase("planning"), stopwatch() as parts:
        most = settings.most_kept_bytes
        make = planners.replan if most is None else partial(replan_keeping, most_kept_bytes=most)
        plan = make(
            network.problem,
            budget_bytes - settings.reserve_bytes,
            [(other.problem, other.plan.steps) for other in alike],
            blocks,
        )
    phases.seconds.update(parts)
    if plan is None:
        return None
    plan = without_reruns(network, plan)
    with phases.phase("compilation"):
        executor = Executor(planned_executable(network, plan))
    return Planned(
        network=network,
        executor=executor,
        plan=plan,
        signature=InputSignature.of(sample),
        outputs=recorded.graph.dataflow.basic.output_spec,
        seconds=phases.seconds,
        budget_bytes=budget_bytes,
        eager_peak_bytes=None,
        measured_peak_bytes=None,
        how="resized",
        family=alike[0].family,
    )


def _family(known: Sequence[Planned], recorded: RunnableGraph) -> list[Planned]:
    """Return the plans whose recordings differ in sizes only: all of one family, or none."""
    seen: list[object] = []
    for first in known:
        if any(first.family is family for family in seen):
            continue
        seen.append(first.family)
        if _differs_in_sizes(recorded, first.network.recorded):
            return [other for other in known if other.family is first.family]
    return []


def _differs_in_sizes(new: RunnableGraph, old: RunnableGraph) -> bool:
    ours, theirs = new.graph, old.graph
    return _groups(ours.nodes) == _groups(theirs.nodes) and same_but_for_sizes(
        ours.dataflow.basic, theirs.dataflow.basic
    )


def _groups(nodes: Sequence[SimplifiedNode]) -> list[tuple[str, int, int]]:
    return [(node.name, len(node.ops), len(node.backward)) for node in nodes]
