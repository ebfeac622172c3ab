"""A new plan, phase by phase.

capture      one recorded step -> B -> D -> S -> the graph that is run     (rkgb)
inductor     runs of its nodes compiled, where asked for       (rkgb)
measurement  time and workspace of each kind of operation                  (rkgb)
calibration  sizes, times and peaks of each node                           -> Problem
eager        one metered step of an eager copy      (for a fraction as budget, and the self-test)
planning     options, chain, simulation, search     -> Plan -> step program
self_test    one step of the planned module against the eager one, bits and bytes

The device counts in blocks of its allocator, and the rounding to blocks is known only after a step
has run. So a plan is tried; its excess is reserved, and the next plan is made within the rest. If
no plan fits any more, the plan of least bytes is tried: either it fits, or its measured peak is the
smallest budget.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from rkgb.elements import own_copy
from rkgb.engine import B_to_D, Sample, device_of, record, runnable
from rkgb.graphs import BackwardKind
from rkgb.guards import nothing_watched
from rkgb.module_state import KeptWrites
from rkgb.torch_api import placed_parameters
from rockmate.comparison.eager import Keep, StepResult
from rockmate.errors import InfeasibleBudgetError, SelfTestError
from rockmate.networks.cutting import Cutting, cutting_of
from rockmate.networks.executables import without_reruns
from rockmate.networks.keeping import Keeping, keeping_of
from rockmate.networks.network import Network, network_of
from rockmate.networks.planned import Planned, compiled_plan
from rockmate.networks.self_test import eager_step, over_budget, peak_of, refuse_wrong_prediction
from rockmate.planners.module_options import plan_keeping
from rockmate.problems.problem import Problem
from rockmate.progress import Phases, stopwatch
from rockmate.requests.request import PHASES, Request, lowered, refuse_nothing, tested
from rockmate.schedules.plan import Plan
from rockmate.settings import Terms, parse_budget

if TYPE_CHECKING:
    from rkgb.compiled import CompiledGraph


_log = logging.getLogger("rockmate")
_FOR_BLOCKS = (
    " and for blocks of the allocator that are larger than what lies in them (less with "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)"
)


def anew(request: Request) -> Planned:
    """Measure, search and test a new plan."""
    try:
        planned = _planned_anew(request)
    except InfeasibleBudgetError as error:
        error.whole = request.basic.opaque
        raise
    request.phases.close("planned")
    return planned


def _planned_anew(request: Request) -> Planned:
    """Measure the recording, run an eager step for comparison, plan, and test the plan."""
    model, given, settings = request.model, request.sample, request.settings
    recorded, phases = request.recorded, request.phases
    budget_bytes, fraction = parse_budget(settings.budget)
    compiled: CompiledGraph | None = None
    if settings.compile:
        from rkgb.compiled import compile_pieces

        with phases.phase("inductor"):
            both = settings.cost == "measured"  # otherwise it is not known which form is faster
            compiled = compile_pieces(B_to_D(request.basic), phases.note, both=both)
            recorded = runnable(compiled.graph)
    network = network_of(model, recorded, given, settings, phases, compiled=compiled)
    keeping: Keeping | None = None
    if compiled is not None:
        with phases.phase("measurement"):
            keeping = keeping_of(network, model, given)
        if keeping is not None:  # measured together with the other form
            network = keeping.network
    eager: StepResult | None = None
    if settings.self_test or fraction is not None:
        with phases.phase("eager"):
            keep: Keep = "nothing"
            if settings.self_test:  # compiled pieces are compared by values
                keep = "values" if settings.compile else "fingerprints"
            eager = eager_step(model, given, network, keep)
            device_of(given.device).give_back()
    if fraction is not None:
        budget_bytes = int(fraction * peak_of(eager, network))
    assert budget_bytes is not None

    cutting: Cutting[Network] | None = None
    if settings.split:
        cutting = cutting_of(network, request.basic, model, given, settings)

    def make(keeping: Keeping | None, within_bytes: int, blocks_bytes: int) -> Planned:
        more = cutting, keeping
        return _planned(request, network, within_bytes, eager, *more, blocks_bytes)

    if not settings.self_test:
        return make(keeping, budget_bytes, 0)
    attempt = partial(tested, request, eager)
    try:
        return within_blocks(partial(make, keeping), attempt, model, given, budget_bytes, 0)
    except SelfTestError as error:
        if keeping is None:
            raise
        _log.warning("pieces keep no more than they must: %s", error)
    return within_blocks(partial(make, None), attempt, model, given, budget_bytes, 0)


def _planned(
    request: Request,
    network: Network,
    budget_bytes: int,
    eager: StepResult | None,
    cutting: Cutting[Network] | None,
    keeping: Keeping | None,
    blocks_bytes: int,
) -> Planned:

    def planner(problem: Problem) -> Plan:
        return _plan_within(request, problem, budget_bytes, blocks_bytes)

    if cutting is None:
        plan = planner(network.problem)
    else:
        network, plan = cutting.chosen(planner)
    if keeping is not None and network.cut is None:
        network, plan = keeping.chosen(plan, planner)
    plan = without_reruns(network, plan)
    return replace(
        compiled_plan(network, plan, request.sample, budget_bytes, request.phases),
        eager_peak_bytes=eager.allocated_peak_bytes if eager is not None else None,
        blocks_bytes=blocks_bytes,
    )


def eager_peak_bytes(
    model: nn.Module, sample: Any, kwargs: Mapping[str, Any] | None, *, losses: bool = True
) -> int:
    """Return the activation peak of a plain step, to which a fraction as budget refers."""
    given = Sample.of(model, sample, kwargs)
    refuse_nothing(model, given)
    given = given.with_leaves(tuple(map(own_copy, given.leaves)))
    with KeptWrites(placed_parameters(model)) as kept:
        eager = eager_step(model, given, None, "nothing", losses=losses)
    if kept.written:  # saved parameters are no memory of the step
        eager = eager_step(*(model, given, None, "nothing"), written=kept.written, losses=losses)
    if eager is not None:
        return eager.allocated_peak_bytes
    settings = Terms(1.0, cost="flops")
    phases = Phases(PHASES, show=False)
    basic = record(model, given, BackwardKind.of_losses if losses else None)
    network = network_of(model, lowered(basic), given, settings, phases)
    return peak_of(None, network)


def _plan_within(request: Request, problem: Problem, budget_bytes: int, blocks_bytes: int) -> Plan:
    """Plan within the budget minus the reserve and the bytes for blocks."""
    settings, phases = request.settings, request.phases
    aside = settings.reserve + blocks_bytes
    with phases.phase("planning"), nothing_watched(), stopwatch() as parts:
        try:
            plan = plan_keeping(
                problem,
                budget_bytes - aside,
                settings.most_kept_bytes,
                effort=settings.effort,
                planner=settings.planner,
                backend=settings.backend,
                progress=lambda fraction, text: phases.note(text, fraction),
                known=request.blocks,
            )
        except InfeasibleBudgetError as error:
            if not aside:
                raise
            minimum = error.minimum_bytes + aside
            raise error.reworded(
                f"of the budget of {budget_bytes} bytes, {aside} are set aside as reserve"
                f"{_FOR_BLOCKS if blocks_bytes else ''}, and in the rest {error}. "
                f"With what is set aside that makes {minimum} bytes",
                asked_bytes=budget_bytes,
                minimum_bytes=minimum,
                bound_bytes=error.bound_bytes + aside,
            ) from None
    # The rest of the time: segments, whole graph, windows, bound.
    parts["search"] = max(0.0, phases.seconds.pop("planning") - sum(parts.values()))
    phases.seconds.update(parts)
    return plan


_MOST_TRIES = 5
# Makes a plan within a budget, with this many bytes reserved for blocks.
Make = Callable[[int, int], Planned]
# Tries a plan; returns it with its measurements, and the step.
Try = Callable[[Planned], tuple[Planned, StepResult]]


def has_blocks(sample: Sample) -> bool:
    """Return whether the allocator of this device rounds requests up to blocks."""
    return device_of(sample.device).block_bytes(1) != 1


def within_blocks(
    make: Make, attempt: Try, model: nn.Module, sample: Sample, budget_bytes: int, aside_bytes: int
) -> Planned:
    """Return a tried plan whose peak, in whole blocks, is within the budget.

    Raises:
        InfeasibleBudgetError: there is none; it names the peak of the least plan, in whole blocks.
        SelfTestError: a step took more than was predicted, on a device without blocks.
    """
    for left in reversed(range(_MOST_TRIES)):
        try:
            planned, ours = attempt(make(budget_bytes, aside_bytes))
        except InfeasibleBudgetError as refusal:
            if not has_blocks(sample):
                raise
            least_bytes = refusal.minimum_bytes - aside_bytes
            return _least(make, attempt, budget_bytes, least_bytes, refusal)
        over_bytes = ours.allocated_peak_bytes - budget_bytes
        if over_bytes <= 0:
            return planned
        refuse_wrong_prediction(planned, model, ours)
        _log.info("%d bytes over the budget in whole blocks: planning again", over_bytes)
        # In the last round no plan fits, which leads to the plan of least bytes.
        aside_bytes = planned.blocks_bytes + 2 * over_bytes if left > 1 else budget_bytes
    raise over_budget(planned, model)


def _least(
    make: Make, attempt: Try, budget_bytes: int, least_bytes: int, refusal: InfeasibleBudgetError
) -> Planned:
    """Return the plan of least bytes if it fits.

    Raises:
        InfeasibleBudgetError: it does not; the error names its peak in whole blocks.
    """
    within_bytes = max(budget_bytes, least_bytes)
    planned, ours = attempt(make(within_bytes, within_bytes - least_bytes))
    peak_bytes = ours.allocated_peak_bytes
    if peak_bytes <= budget_bytes and least_bytes <= budget_bytes:
        return planned
    minimum_bytes = max(peak_bytes, least_bytes)
    raise refusal.reworded(
        f"{refusal}. Tried out, the plan of least bytes takes {minimum_bytes} bytes in whole "
        "blocks of the allocator, which are larger than what lies in them (less with "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True): that is the smallest budget",
        asked_bytes=budget_bytes,
        minimum_bytes=minimum_bytes,
    ) from None
