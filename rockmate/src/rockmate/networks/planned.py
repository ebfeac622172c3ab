"""A planned module: the plan of a network, compiled, and how a step runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from torch import Tensor, nn

from rkgb import RkgbError
from rkgb.capture import for_same_numbers, no_collection, record_other_backward
from rkgb.compiled import compile_variant
from rkgb.costs import Measured, measure_others, op_key
from rkgb.elements import Assign, Check, Effect, Look, Numbers, Op, Ref, Refill, Structure, Write
from rkgb.engine import (
    Sample,
    compile_step,
    external_values,
    lower_step,
    measure,
    node_facts,
    operations,
    plain_callee,
    record,
    runnable,
)
from rkgb.graphs import BackwardKind, BasicGraph, SimplifiedGraph, autocast_as
from rkgb.opaque import RunPiece
from rkgb.run import Outcomes, RunnableGraph, without_idle_steps
from rockmate.errors import InfeasibleBudgetError, RockmateError
from rockmate.keys.input_signature import InputSignature
from rockmate.keys.module_state import without_hooks
from rockmate.networks.likely import likely_kinds
from rockmate.networks.network import Network, assembled
from rockmate.networks.network_problem import problem_of
from rockmate.problems.problem import Problem
from rockmate.progress import Phases
from rockmate.reports.plan_report import CompiledPart
from rockmate.runtime.executable import Executable
from rockmate.runtime.execute import Executor
from rockmate.runtime.plain import plain
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.plan import Plan
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Step

_log = logging.getLogger("rockmate")


# Makes a plan for a problem within the budget of another plan, whose steps need not fit.
Replan = Callable[[Problem], Plan]


@dataclass(frozen=True)
class Planned:
    """A module planned for one kind of input.

    `how` says what it took: "planned" from nothing; "recorded" only, with the steps of a plan whose
    program differs in numbers; "resized" from plans whose programs differ in sizes.
    """

    network: Network
    executor: Executor
    plan: Plan
    signature: InputSignature
    outputs: Structure
    seconds: Mapping[str, float]
    budget_bytes: int
    eager_peak_bytes: int | None
    measured_peak_bytes: int | None
    how: Literal["planned", "recorded", "resized"] = "planned"
    blocks_bytes: int = 0  # set aside for what the allocator hands out in whole blocks
    family: object = field(default_factory=object)  # one for all that differ in sizes only
    comparison: str = ""  # what the self-test found, where bits could not be demanded
    other_gradients: Replan | None = None  # of a plan for those that had come before, not the usual

    @property
    def problem(self) -> Problem:
        """What was planned."""
        return self.network.problem

    @cached_property
    def outcomes(self) -> Outcomes:
        """What the recorded forward has looked at."""
        return Outcomes(self.network.graph.dataflow.basic)

    @property
    def numbers(self) -> Numbers | None:
        """What follows from a call's numbers, where the plan is for all of them."""
        return self.network.graph.dataflow.basic.numbers

    @property
    def effects(self) -> tuple[Effect, ...]:
        """What a step leaves behind besides its result."""
        return self.network.graph.dataflow.basic.effects

    @cached_property
    def may_go_another_way(self) -> bool:
        """Whether a step may find that its recording does not hold for it."""
        checks = any(isinstance(effect, (Check, Write)) for effect in self.effects)
        ops = self.network.graph.dataflow.basic.ops
        return checks or any(isinstance(op.target, RunPiece) for op in ops)

    @property
    def assigned(self) -> tuple[tuple[str, str], ...]:
        """Attributes that every step sets: path of the submodule, and name."""
        return tuple((e.path, e.name) for e in self.effects if isinstance(e, Assign))

    def foresee(self, model: nn.Module, leaves: Sequence[Any]) -> None:
        """Record the backwards that are likely to be asked for, while nothing of a step is held.

        A model that returns its loss and its logits is trained on the loss: a recording for that in
        the midst of the first backward would come on top of what the step holds.
        """
        if self.network.compiled is not None:  # what is held goes first, and it takes long
            return
        basic = self.network.graph.dataflow.basic
        variants = self.executor.variants
        for kind in likely_kinds(basic):
            try:
                if kind not in variants:
                    variants[kind] = _variant(self, model, leaves, kind, in_a_step=False)
            except RkgbError as error:  # it may never be asked for
                _log.debug("cannot record the backward for %s: %s", kind, error)

    def run(
        self,
        model: nn.Module,
        external: Mapping[str, Tensor],
        leaves: Sequence[Any],
        *,
        looks: bool = True,
        call: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    ) -> Any:
        """Run the planned forward; `model` and `leaves` serve to record other gradients.

        Without `looks`, hooks of submodules that only look are not called. Of a `call` with these
        arguments, those are changed that the forward changes.
        """

        def variant(kind: BackwardKind) -> Executable:
            return _variant(self, model, leaves, kind)

        names = self.executor.expected.program.outputs
        # Not the tensors, which the step would keep alive.
        numbers = (
            () if self.numbers is None else [x if type(x) in (float, int) else None for x in leaves]
        )
        made = dict(zip(names, self.executor(external, variant, model, numbers), strict=True))
        results = [
            (made[out.name] if out.name in made else external[out.name])
            if isinstance(out, Ref)
            else out
            for out in self.network.graph.outputs
        ]
        result = self.outputs.unflatten(results)
        if not self.effects:
            return result
        result, values = result
        for effect, value in zip(self.effects, values, strict=True):
            if isinstance(effect, Write):
                effect.apply(leaves, value)
            elif isinstance(effect, Refill):
                if call is not None:
                    effect.apply(*call, value)
            elif looks or not isinstance(effect, Look):
                effect.apply(model, value)
        return result


def compiled_part(planned: Planned) -> CompiledPart | None:
    """Return what is compiled in a plan, for its report; None where nothing was to be."""
    compiled = planned.network.compiled
    if compiled is None:
        return None
    return CompiledPart(
        nodes=len(compiled.classes),
        compiled=compiled.count,
        classes=len(set(compiled.classes) - {""}),
        compiled_now=compiled.compiled_now,
        keeping=len(planned.network.kept),
        seconds=planned.seconds.get("inductor", 0.0),
        eager=tuple((e.module_path, e.name, e.why) for e in compiled.eager),
        agreement=planned.comparison,
    )


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
        network.graph, steps, network.measured, spare_bytes=_spare_bytes(network, steps)
    )


def _spare_bytes(network: Network, steps: Sequence[Step]) -> list[int]:
    """Return how much gradients that wait may take in each step.

    They must not move a peak that was predicted: in blocks, and as asked for.
    """
    problems = {id(problem): problem for problem in (network.problem, network.asked)}
    timelines = [simulate(problem, steps) for problem in problems.values()]
    rooms = ([line.peak_bytes - during for during in line.peak_during] for line in timelines)
    return [min(room) for room in zip(*rooms, strict=True)]


def _spare_with_fewer(network: Network, plan: Plan, steps: Sequence[Any]) -> list[int]:
    """Return the same for the steps of fewer gradients, which are some of the plan's.

    Each needs what it needs in the plan, at most. A step that the plan has not lets nothing wait.
    """
    planned = tuple(Step(*step) for step in without_idle_steps(network.graph, plan.steps))
    spare = _spare_bytes(network, planned)
    place, found = 0, []
    for step in steps:
        try:
            place = planned.index(Step(*step), place)
        except ValueError:
            found.append(0)
        else:
            found.append(spare[place])
    return found


def compiled_plan(
    network: Network, plan: Plan, sample: Sample, budget_bytes: int, phases: Phases
) -> Planned:
    """Return a plan with its program, of which nothing has run yet."""
    return Planned(
        network=network,
        executor=Executor(planned_executable(network, plan)),
        plan=plan,
        signature=InputSignature.of(sample),
        outputs=network.graph.dataflow.basic.output_spec,
        seconds=phases.seconds,
        budget_bytes=budget_bytes,
        eager_peak_bytes=None,
        measured_peak_bytes=None,
    )


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
    callees = {op.name: chosen.get(op_key(op, infos)) for op in operations(graph)}

    def callee(op: Op) -> Callable[..., Any]:
        return callees.get(op.name) or plain_callee(op)

    compiled = compile_step(graph, lower_step(graph, steps, spare_bytes), callee)
    return Executable(graph, compiled, leaves or leaves_of(graph))


def leaves_of(graph: SimplifiedGraph) -> tuple[str, ...]:
    """Return the leaf of each part of a gradient that the backward of a graph hands over."""
    return tuple(h.leaf for node in graph.nodes for h in node.hand_overs)


def _variant(
    planned: Planned,
    model: nn.Module,
    leaves: Sequence[Any],
    kind: BackwardKind,
    *,
    in_a_step: bool = True,
) -> Executable:
    """Return the executable for gradients that arrive otherwise, from a recording of their own.

    Where that would not fit beside what a step holds, it is made without content, if it can be.
    """
    sample = planned.signature.sample_of(leaves)
    _log.info("recording another backward: %s", kind)
    with autocast_as(planned.signature.autocast), plain(), no_collection():
        bare = without_hooks(model, type(model))
        known = planned.network.graph.dataflow.basic
        needed = _recording_bytes(known, kind) if in_a_step else 0
        is_tight = needed > planned.budget_bytes
        basic = record_other_backward(bare, sample, known, kind) if is_tight else None
        if basic is None:
            if is_tight:
                _log.warning(
                    "gradients have come as never before, and their backward has to be recorded on "
                    "real tensors: this step may take about %d bytes, and the budget is %d",
                    *(needed, planned.budget_bytes),
                )
            basic = record(bare, sample, kind, opaque=known.opaque, known=known)
        if known.numbers is not None:
            basic = for_same_numbers(basic, known.numbers, bare, sample, model)
    network, measured = planned.network, planned.network.measured
    if planned.other_gradients is not None:
        graph = network.recorded.with_backward(basic)
        return _within_budget(planned, planned.other_gradients, graph, model, leaves)
    every = leaves_of(planned.network.graph)
    if network.compiled is not None:
        graph = runnable(compile_variant(network.compiled, basic)).graph
        measured = _measured_within(planned, graph, model, leaves)
        steps = without_idle_steps(graph, planned.plan.steps)
        return executable(graph, steps, measured, leaves=every)
    graph = network.recorded.with_backward(basic)
    steps = without_idle_steps(graph, planned.plan.steps)
    spare = _spare_with_fewer(network, planned.plan, steps)
    return executable(graph, steps, measured, leaves=every, spare_bytes=spare)


def _recording_bytes(known: BasicGraph, kind: BackwardKind) -> int:
    """Return about what is held while another backward is recorded in the midst of a step.

    Outputs and their gradients, of the step and of the recording, and what its widest nodes use.
    """
    infos = known.infos
    outputs = {infos[name].alias_of: infos[name].storage_bytes for name in known.output_names}
    asked = (root for root, t in zip(known.roots, kind.tangents, strict=True) if t is not None)
    gradients = sum(infos[root].size_bytes for root in asked)
    made = ([n for n in op.results if n] for op in (*known.ops, *known.backward))
    widest = max((sum(infos[n].size_bytes for n in names) for names in made), default=0)
    return 2 * (sum(outputs.values()) + gradients) + 4 * widest


def _within_budget(
    planned: Planned,
    replan: Replan,
    graph: SimplifiedGraph,
    model: nn.Module,
    leaves: Sequence[Any],
) -> Executable:
    """Return the program for gradients that were not foreseen; they may need a plan of their own.

    Raises:
        InfeasibleBudgetError: there is none within the budget.
    """
    external = external_values(graph.dataflow.basic, model, tuple(leaves))
    known = planned.network.measured
    measured = measure_others(graph.dataflow.basic, operations(graph), external, known)
    network = assembled(graph, planned.network.recorded, measured, external)
    every = leaves_of(planned.network.graph)
    plan, is_apart = planned.plan, False
    if not _fits(network.problem, plan, without_idle_steps(graph, plan.steps)):
        plan, is_apart = without_reruns(network, replan(network.problem)), True
    steps = tuple(Step(*step) for step in without_idle_steps(graph, plan.steps))
    spare = _spare_bytes(network, steps)
    made = executable(graph, steps, measured, leaves=every, spare_bytes=spare)
    return replace(made, is_apart=is_apart)


def _fits(problem: Problem, plan: Plan, steps: Sequence[Any]) -> bool:
    """Whether the steps of a plan for another problem of the same forward are a plan for this."""
    try:
        peak_bytes = simulate(problem, [Step(*step) for step in steps]).peak_bytes
    except RockmateError:
        return False
    return peak_bytes <= plan.budget_bytes


def _measured_within(
    planned: Planned, graph: SimplifiedGraph, model: nn.Module, leaves: Sequence[Any]
) -> Measured:
    """Measure pieces that were compiled for other gradients, and simulate the plan with them.

    Raises:
        InfeasibleBudgetError: they keep more, and the plan would not fit any more.
    """
    basic = graph.dataflow.basic
    external = external_values(basic, model, tuple(leaves))
    measured = measure(basic, operations(graph), external, times=False)
    problem = problem_of(graph, node_facts(graph, measured.costs), external)
    steps = without_idle_steps(graph, planned.plan.steps)
    peak = simulate(problem, [Step(*step) for step in steps]).peak_bytes
    if peak > planned.budget_bytes:
        raise InfeasibleBudgetError(
            "the gradients that have arrived lie otherwise in memory than those that were planned "
            f"for, and the pieces that are compiled for them need {peak} bytes with the same plan. "
            "Raise the budget, or hand back gradients as they were (contiguous, at the same "
            "outputs)",
            asked_bytes=planned.budget_bytes,
            minimum_bytes=peak,
        )
    return measured


def with_other_numbers(
    planned: Planned,
    graph: SimplifiedGraph,
    recorded: RunnableGraph,
    sample: Sample,
    phases: Phases,
) -> Planned:
    """Return a plan with the program of another recording, and everything else as planned.

    `graph` is the one of the plan that the recording differs from in numbers only.
    """
    old = planned.network
    basic = recorded.graph.dataflow.basic
    pairs = zip(operations(recorded.graph), operations(graph), strict=True)
    infos = basic.infos
    keys = {op_key(op, infos): op_key(known, infos) for op, known in pairs}
    costs, chosen = old.measured.costs, old.measured.callees
    measured = replace(
        old.measured,
        # A backward for other gradients has kinds that were not measured.
        costs={new: costs[key] for new, key in keys.items() if key in costs},
        callees={new: chosen[key] for new, key in keys.items() if key in chosen},
    )
    network = replace(
        old,
        recorded=recorded,
        graph=recorded.graph,
        measured=measured,
    )
    if graph is old.graph:
        program = planned_executable(network, planned.plan)
    else:  # the problem is one of other gradients, and says nothing of these
        steps = without_idle_steps(recorded.graph, planned.plan.steps)
        program = executable(recorded.graph, steps, measured, leaves=leaves_of(old.graph))
    return replace(
        planned,
        network=network,
        executor=Executor(program),
        signature=InputSignature.of(sample),
        outputs=basic.output_spec,
        seconds=phases.seconds,
        how="recorded",
    )
