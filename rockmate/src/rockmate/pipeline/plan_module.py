"""From a module, a sample and a budget to an executor: the whole road, phase by phase.

capture      one recorded step -> B -> D -> S -> the graph that is run     (rkgb)
inductor     runs of its nodes compiled, where asked for       (rkgb)
measurement  time and workspace of each kind of operation                  (rkgb)
calibration  sizes, times and peaks of each node                           -> Problem
eager        one metered step of the eager twin     (for a fraction as budget, and the self-test)
planning     options, chain, simulation, search     -> Plan -> step program
self_test    one step of the planned module against the twin, bits and bytes
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from rkgb.capture import no_collection
from rkgb.compiled import CompiledGraph, compile_pieces
from rkgb.engine import B_to_D, D_to_S, Sample, device_of, record, runnable
from rkgb.graphs import PLANNED_PASSES, BackwardKind, BasicGraph
from rkgb.opaque import KeptWrites
from rkgb.run import RunnableGraph
from rkgb.torch_api import placed_parameters
from rockmate import planners
from rockmate.comparison.deterministic import deterministic_algorithms
from rockmate.comparison.eager import Keep, StepResult
from rockmate.errors import InfeasibleBudgetError, SelfTestError, UnsupportedModuleError
from rockmate.files.plan_file import SavedPlan
from rockmate.networks.executables import without_reruns
from rockmate.networks.keeping import Keeping, keeping_of
from rockmate.networks.network import Network, network_of
from rockmate.networks.planned import Planned, compiled_plan
from rockmate.networks.self_test import (
    eager_step,
    over_budget,
    own_copy,
    peak_of,
    self_test,
)
from rockmate.options.known_blocks import KnownBlocks
from rockmate.pipeline.follow import Call
from rockmate.pipeline.saved_plan import budget_for, network_from, plan_for
from rockmate.pipeline.shelf import Asked, NoShelf, Shelf
from rockmate.pipeline.within_blocks import within_blocks
from rockmate.planners.module_options import plan_keeping
from rockmate.problems.problem import Problem
from rockmate.progress import Phases, stopwatch
from rockmate.schedules.plan import Plan
from rockmate.settings import Terms, parse_budget

_log = logging.getLogger("rockmate")
_FOR_BLOCKS = (
    " and for blocks of the allocator that are larger than what lies in them (less with "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)"
)
PHASES = {  # and what part of planning each usually takes, for the progress bar
    "capture": 0.12,
    "measurement": 0.25,
    "calibration": 0.03,
    "eager": 0.05,
    "planning": 0.45,
    "self_test": 0.1,
}


def plan_module(
    model: nn.Module,
    sample: Any,
    kwargs: Mapping[str, Any] | None,
    settings: Terms,
    known: Sequence[Planned] = (),
    blocks: KnownBlocks | None = None,
    *,
    guards: bool = True,
    shelf: Shelf | None = None,
    any_number: frozenset[int] | None = None,
    own: nn.Module | None = None,
    losses: bool = True,
) -> Planned:
    """Plan `model` on `sample` within the budget.

    Where scalars are among its outputs, only these are taken to get gradients, with `losses`; a
    backward from other outputs is planned for when it comes.

    Where the recording is that of a `known` plan but for numbers in it, that plan's steps serve; so
    do those of a plan that lies on the `shelf`, with the costs that were measured then. Where it
    differs in sizes, known steps and what is known of `blocks` are tried first (`follow`).
    With `any_number`, the plan is for all floats in the place of the sample's, and all ints in the
    place of these leaves, if they only enter arithmetic (`Planned.numbers` says so).
    The module, its buffers and gradients, and the random stream are left as they were.

    Raises:
        BudgetFormatError: the budget cannot be read.
        InfeasibleBudgetError: no plan fits; it names the smallest budget that does, and what runs
            whole.
        rkgb.TraceError, rkgb.UnsupportedOpError: the module cannot be recorded exactly.
        UnsupportedModuleError: the module or its state cannot be run exactly.
        SelfTestError: the planned module disagreed with eager PyTorch.
    """
    if settings.self_test == "deterministic":
        settings = replace(settings, self_test=True)
        _compare_deterministically(*(model, sample, kwargs, settings), guards=guards, losses=losses)
    budget_bytes, fraction = parse_budget(settings.budget)
    given = Sample.of(model, sample, kwargs)
    _refuse_nothing(model, given)
    blocks = KnownBlocks() if blocks is None else blocks
    phases = Phases(_phases(settings), show=settings.progress)
    if settings.compile:
        known, shelf, any_number = (), None, None  # numbers and sizes are compiled in
    shelf = NoShelf() if shelf is None else shelf
    call = Call(model, given, settings, phases, known, blocks, guards, any_number, own, losses)
    return call.ready_for_others(_found(call, shelf, budget_bytes, fraction))


def _found(call: Call, shelf: Shelf, budget_bytes: int | None, fraction: float | None) -> Planned:
    """Return a plan that follows from known ones, was made before, or is made now."""
    # Ranks that share plans ask each other at every call, or at none.
    followed = None if shelf.is_asked_first else call.with_expected_gradients()
    if followed is not None:
        return followed
    basic, recorded = call.record()
    followed = call.with_other_numbers(recorded)
    if followed is not None:
        return followed
    asked = Asked(call.model, recorded, call.sample, call.settings)
    made_before = _made_before(call, asked, shelf)
    if made_before is not None:
        return made_before
    try:
        planned = _planned_anew(call, basic, recorded, budget_bytes, fraction)
    except InfeasibleBudgetError as error:
        error.whole = basic.opaque
        raise
    call.phases.close("planned")
    shelf.keep(asked, planned)
    return planned


def _made_before(call: Call, asked: Asked, shelf: Shelf) -> Planned | None:
    """Return what a plan for other sizes or a saved plan makes of this recording, if there is one.

    A plan file and the other ranks are asked first; a folder of plans after the plans at hand.
    """
    saved = shelf.find(asked) if shelf.is_asked_first else None
    if saved is None:
        resized = call.resized(asked.recorded)
        if resized is not None:
            if shelf.is_asked_first:
                shelf.keep(asked, resized)
            return resized
        saved = None if shelf.is_asked_first else shelf.find(asked)
    return None if saved is None else _planned_before(saved, asked, call.phases)


def _planned_anew(
    call: Call,
    basic: BasicGraph,
    recorded: RunnableGraph,
    budget_bytes: int | None,
    fraction: float | None,
) -> Planned:
    """Measure what was recorded, take an eager step for comparison, plan, and test the plan."""
    model, given, settings, phases = call.model, call.sample, call.settings, call.phases
    compiled: CompiledGraph | None = None
    if settings.compile:
        with phases.phase("inductor"):
            both = settings.cost == "measured"  # else nothing says that one form is faster
            compiled = compile_pieces(B_to_D(basic), phases.note, both=both)
            recorded = runnable(compiled.graph)
    network = network_of(model, recorded, given, settings, phases, compiled=compiled)
    keeping: Keeping | None = None
    if compiled is not None:
        with phases.phase("measurement"):
            keeping = keeping_of(network, model, given)
        network = network if keeping is None else keeping.network  # measured again beside the other
    eager: StepResult | None = None
    if settings.self_test or fraction is not None:
        with phases.phase("eager"), no_collection():
            effects = network.graph.dataflow.basic.effects
            keep: Keep = "nothing"
            if settings.self_test:  # what is compiled is compared by its values
                keep = "values" if settings.compile else "fingerprints"
            written = network.graph.dataflow.basic.written_parameters
            losses = network.graph.dataflow.basic.kind.is_of_losses
            eager = eager_step(
                *(model, given, network.problem, keep, effects), written=written, losses=losses
            )
            device_of(given.device).give_back()
    if fraction is not None:
        budget_bytes = int(fraction * peak_of(eager, network.problem))
    assert budget_bytes is not None

    def make(keeping: Keeping | None, within_bytes: int, blocks_bytes: int) -> Planned:
        return _planned(
            *(network, given, within_bytes, eager, settings, phases, call.blocks),
            *(keeping, blocks_bytes),
        )

    if not settings.self_test:
        return make(keeping, budget_bytes, 0)
    attempt = partial(_tested, call, eager)
    try:
        return within_blocks(partial(make, keeping), attempt, model, given, budget_bytes, 0)
    except SelfTestError as error:
        if keeping is None:
            raise
        _log.warning("pieces keep no more than they must: %s", error)
    return within_blocks(partial(make, None), attempt, model, given, budget_bytes, 0)


def _tested(call: Call, eager: StepResult | None, planned: Planned) -> tuple[Planned, StepResult]:
    with call.phases.phase("self_test"), no_collection():
        ours, found = self_test(planned, call.model, call.sample, eager)
        device_of(call.sample.device).give_back()
    measured_bytes = ours.allocated_peak_bytes
    return replace(planned, measured_peak_bytes=measured_bytes, comparison=found), ours


def _planned_before(saved: SavedPlan, asked: Asked, phases: Phases) -> Planned:
    """Return the planned module of a saved plan; what was tested then is not tested again."""
    model, given, settings = asked.model, asked.sample, asked.settings
    with phases.phase("saved plan"):
        network = network_from(saved, model, asked.recorded, given)
        budget_bytes = budget_for(saved, network, settings)
        plan = plan_for(saved, network, settings, budget_bytes)
        planned = replace(
            compiled_plan(network, plan, given, budget_bytes, phases),
            eager_peak_bytes=saved.eager_peak_bytes,
            measured_peak_bytes=saved.measured_peak_bytes,
            blocks_bytes=saved.blocks_bytes,
            comparison=saved.comparison,
        )
    if settings.self_test and saved.measured_peak_bytes is None:
        with phases.phase("self_test"), no_collection():
            eager = eager_step(
                *(model, given, network.problem, "fingerprints", planned.effects),
                written=planned.written,
                losses=planned.is_for_losses,
            )
            ours, found = self_test(planned, model, given, eager)
            device_of(given.device).give_back()
        planned = replace(planned, measured_peak_bytes=ours.allocated_peak_bytes, comparison=found)
        if ours.allocated_peak_bytes > budget_bytes:
            raise over_budget(planned, model)
    phases.close("a saved plan serves")
    return planned


def _phases(settings: Terms) -> Mapping[str, float]:
    return {**PHASES, "inductor": 1.0} if settings.compile else PHASES


def _compare_deterministically(
    model: nn.Module,
    sample: Any,
    kwargs: Mapping[str, Any] | None,
    settings: Terms,
    *,
    guards: bool,
    losses: bool,
) -> None:
    """Plan and test once for deterministic kernels: there bits must agree.

    Raises:
        SelfTestError: they do not.
    """
    trial = replace(settings, progress=False)
    with deterministic_algorithms():
        try:
            plan_module(model, sample, kwargs, trial, guards=guards, losses=losses)
        except InfeasibleBudgetError as error:  # these kernels may need more
            trial = replace(trial, budget=error.minimum_bytes)
            plan_module(model, sample, kwargs, trial, guards=guards, losses=losses)


def _planned(
    network: Network,
    given: Sample,
    budget_bytes: int,
    eager: StepResult | None,
    settings: Terms,
    phases: Phases,
    blocks: KnownBlocks,
    keeping: Keeping | None,
    blocks_bytes: int = 0,
) -> Planned:

    def planner(problem: Problem) -> Plan:
        return _plan_within(problem, budget_bytes, settings, phases, blocks, blocks_bytes)

    plan = planner(network.problem)
    if keeping is not None:
        network, plan = keeping.chosen(plan, planner)
    plan = without_reruns(network, plan)
    return replace(
        compiled_plan(network, plan, given, budget_bytes, phases),
        eager_peak_bytes=eager.allocated_peak_bytes if eager is not None else None,
        blocks_bytes=blocks_bytes,
    )


def eager_peak_bytes(
    model: nn.Module, sample: Any, kwargs: Mapping[str, Any] | None, *, losses: bool = True
) -> int:
    """Return the activation peak of a plain step, which a fraction as budget refers to."""
    given = Sample.of(model, sample, kwargs)
    _refuse_nothing(model, given)
    given = given.with_leaves(tuple(map(own_copy, given.leaves)))
    with KeptWrites(placed_parameters(model)) as kept:
        eager = eager_step(model, given, None, "nothing", losses=losses)
    if kept.written:  # what was kept is no memory of a step
        eager = eager_step(*(model, given, None, "nothing"), written=kept.written, losses=losses)
    if eager is not None:
        return eager.allocated_peak_bytes
    settings = Terms(1.0, cost="flops")
    phases = Phases(PHASES, show=False)
    basic = record(model, given, BackwardKind.of_losses if losses else None)
    recorded = runnable(D_to_S(B_to_D(basic), passes=PLANNED_PASSES))
    network = network_of(model, recorded, given, settings, phases)
    return peak_of(None, network.problem)


def _plan_within(
    problem: Problem,
    budget_bytes: int,
    settings: Terms,
    phases: Phases,
    blocks: KnownBlocks,
    blocks_bytes: int = 0,
) -> Plan:
    """Plan with what is left of the budget once reserve and blocks are set aside."""
    aside = settings.reserve + blocks_bytes
    most = settings.most_kept_bytes
    make = planners.plan if most is None else partial(plan_keeping, most_kept_bytes=most)
    with phases.phase("planning"), stopwatch() as parts:
        try:
            plan = make(
                problem,
                budget_bytes - aside,
                effort=settings.effort,
                planner=settings.planner,
                backend=settings.backend,
                progress=lambda fraction, text: phases.note(text, fraction),
                known=blocks,
            )
        except InfeasibleBudgetError as error:
            if not aside:
                raise
            minimum = error.minimum_bytes + aside
            raise InfeasibleBudgetError(
                f"of the budget of {budget_bytes} bytes, {aside} are set aside as reserve"
                f"{_FOR_BLOCKS if blocks_bytes else ''}, and in the rest {error}. "
                f"With what is set aside that makes {minimum} bytes",
                asked_bytes=budget_bytes,
                minimum_bytes=minimum,
                bound_bytes=error.bound_bytes + aside,
            ) from None
    # What is neither options, chain nor simulation: segments, whole graph, windows, bound.
    parts["search"] = max(0.0, phases.seconds.pop("planning") - sum(parts.values()))
    phases.seconds.update(parts)
    return plan


def _refuse_nothing(model: nn.Module, sample: Sample) -> None:
    wanting = [t for t in (*model.parameters(), *sample.tensors) if t.requires_grad]
    if not wanting:
        raise UnsupportedModuleError(
            f"nothing in {type(model).__name__} or its inputs requires a gradient, so there is no "
            "backward to plan for. Set requires_grad, or use the module without Rockmate."
        )
    if not any(module.training for module in model.modules()):
        raise UnsupportedModuleError(
            f"{type(model).__name__} is in eval mode, which runs the original module unplanned. "
            "Call model.train() before wrapping it."
        )
