"""From a module, a sample and a budget to an executor: the whole road, phase by phase.

capture      one recorded step -> B -> D -> S -> the graph that is run     (rkgb)
measurement  time and workspace of each kind of operation                  (rkgb)
calibration  sizes, times and peaks of each node                           -> Problem
eager        one metered step of the eager twin     (for a fraction as budget, and the self-test)
planning     options, chain, simulation, search     -> Plan -> step program
self_test    one step of the planned module against the twin, bits and bytes
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rkgb.engine import (
    PLANNED_PASSES,
    B_to_D,
    BackwardKind,
    D_to_S,
    FlopCost,
    Measured,
    NodeFacts,
    Op,
    OpCost,
    Ref,
    RunnableGraph,
    SimplifiedGraph,
    autocast_as,
    bind_inputs,
    check_device,
    choose_plainly,
    compile_step,
    external_values,
    lower_step,
    make_B,
    measure,
    node_facts,
    op_key,
    operations,
    runnable,
    twin_of,
    without_idle_steps,
)
from rockmate.budget import Budget, parse_budget
from rockmate.errors import InfeasibleBudgetError, SelfTestError, UnsupportedModuleError
from rockmate.plan import Plan
from rockmate.planners import plan as make_plan
from rockmate.planners.simple import no_recomputation
from rockmate.problem import Problem
from rockmate.progress import Phases
from rockmate.runtime.eager import StepResult, compare, run_step
from rockmate.runtime.execute import Executable, Executor
from rockmate.runtime.input_signature import InputSignature
from rockmate.runtime.module_state import ExternalValues, refuse_hooks
from rockmate.runtime.network_problem import problem_of
from rockmate.simulate import simulate
from rockmate.steps import Step
from rockmate.stopwatch import stopwatch

_log = logging.getLogger("rockmate")
PHASES = (
    "capture",
    "measurement",
    "calibration",
    "eager",
    "planning",
    "self_test",
)


@dataclass(frozen=True)
class Settings:
    """How to plan; see `Rockmate` for what the fields mean."""

    budget: Budget
    effort: str | float = "fast"
    cost: Literal["measured", "flops"] = "measured"
    self_test: bool = True
    reserve_bytes: int = 0
    planner: str = "auto"
    backend: str = "cp-sat"
    progress: bool = False
    max_plans: int = 4


@dataclass(frozen=True)
class Network:
    """A recorded module, what its nodes cost, and the problem that they make."""

    recorded: RunnableGraph
    graph: SimplifiedGraph
    measured: Measured
    facts: tuple[NodeFacts, ...]
    problem: Problem


@dataclass(frozen=True)
class Planned:
    """A module planned for one kind of input."""

    network: Network
    executor: Executor
    plan: Plan
    signature: InputSignature
    output_spec: pytree.TreeSpec
    seconds: Mapping[str, float]
    budget_bytes: int
    eager_peak_bytes: int | None
    measured_peak_bytes: int | None

    @property
    def problem(self) -> Problem:
        """What was planned."""
        return self.network.problem

    def __call__(self, model: nn.Module, values: ExternalValues, leaves: Sequence[Any]) -> Any:
        """Run the planned forward on `model` as it is now; `leaves` passed `signature.check`."""
        external = values.now(tuple(leaves))
        return self.run(model, external, leaves)

    def run(self, model: nn.Module, external: Mapping[str, Tensor], leaves: Sequence[Any]) -> Any:
        """Run the planned forward; `model` and `leaves` serve to record other gradients."""

        def variant(kind: BackwardKind) -> Executable:
            return _variant(self, model, leaves, kind)

        names = self.executor.expected.program.outputs
        made = dict(zip(names, self.executor(external, variant), strict=True))
        results = [
            (made[out.name] if out.name in made else external[out.name])
            if isinstance(out, Ref)
            else out
            for out in self.network.graph.outputs
        ]
        return self.output_spec.unflatten(results)


def plan_module(
    model: nn.Module, sample: Any, kwargs: Mapping[str, Any] | None, settings: Settings
) -> Planned:
    """Plan `model` on `sample` within the budget.

    The module, its buffers and gradients, and the random stream are left as they were.

    Raises:
        BudgetFormatError: the budget cannot be read.
        InfeasibleBudgetError: no plan fits; it names the smallest budget that does.
        rkgb.TraceError, rkgb.UnsupportedOpError: the module cannot be recorded exactly.
        UnsupportedModuleError: the module or its state cannot be run exactly.
        SelfTestError: the planned module disagreed with eager PyTorch.
    """
    budget_bytes, fraction = parse_budget(settings.budget)
    args, keywords = bind_inputs(sample, kwargs)
    device = check_device(model, (args, keywords), None)
    _refuse_nothing_to_do(model, args, keywords)
    refuse_hooks(model)
    signature = InputSignature.of(args, keywords)
    phases = Phases(PHASES, show=settings.progress)
    network = _network(model, args, keywords, device, settings, phases)
    eager: StepResult | None = None
    if settings.self_test or fraction is not None:
        with phases.phase("eager"):
            eager = _eager_step(model, args, keywords, device, settings.self_test)
    if fraction is not None:
        budget_bytes = int(fraction * _eager_peak_bytes(eager, network.problem))
    assert budget_bytes is not None
    plan = _plan_within(network.problem, budget_bytes, settings, phases)
    planned = Planned(
        network=network,
        executor=Executor(_planned_executable(network, plan)),
        plan=plan,
        signature=signature,
        output_spec=network.graph.dataflow.basic.output_spec,
        seconds=phases.seconds,
        budget_bytes=budget_bytes,
        eager_peak_bytes=eager.peak_bytes if eager is not None else None,
        measured_peak_bytes=None,
    )
    if settings.self_test:
        with phases.phase("self_test"):
            measured = _self_test(planned, model, args, keywords, eager, device, budget_bytes)
        planned = replace(planned, measured_peak_bytes=measured)
    phases.close("planned")
    return planned


def _network(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
    settings: Settings,
    phases: Phases,
) -> Network:
    with phases.phase("capture"):
        basic = make_B(model, args, device, kwargs=kwargs)
        recorded = runnable(D_to_S(B_to_D(basic), passes=PLANNED_PASSES))
    graph = recorded.graph
    leaves = tuple(pytree.tree_leaves((args, dict(kwargs))))
    external = external_values(basic, model, leaves)
    with phases.phase("measurement"):
        ops = operations(graph)
        measured = measure(basic, ops, external, times=settings.cost == "measured")
        if settings.cost == "flops":
            measured = replace(measured, costs=_by_flops(graph, ops, measured))
    with phases.phase("calibration"):
        facts = node_facts(graph, measured.costs)
        problem = problem_of(graph, facts, external)
    return Network(recorded, graph, measured, facts, problem)


def _by_flops(
    graph: SimplifiedGraph, ops: Sequence[Op], measured: Measured
) -> Mapping[str, OpCost]:
    infos, source = graph.dataflow.infos, FlopCost()
    kinds = {op_key(op, infos): op for op in ops}
    return {
        key: replace(cost, time_ms=source.time_ms(kinds[key], infos))
        for key, cost in measured.costs.items()
    }


def _planned_executable(network: Network, plan: Plan) -> Executable:
    steps = tuple(Step(*step) for step in without_idle_steps(network.graph, plan.steps))
    timeline = simulate(network.problem, steps)
    # Gradients that wait must not move the peak that was predicted.
    spare = [timeline.peak_bytes - during for during in timeline.peak_during]
    return executable(network.graph, steps, network.measured, spare_bytes=spare)


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
        return callees.get(op.name) or choose_plainly(op)

    compiled = compile_step(graph, lower_step(graph, steps, spare_bytes), callee)
    return Executable(graph, compiled, leaves or leaves_of(graph))


def leaves_of(graph: SimplifiedGraph) -> tuple[str, ...]:
    """Return the parameters and inputs that the backward of a graph gives gradients to."""
    return tuple(dict.fromkeys(h.leaf for node in graph.nodes for h in node.hand_overs))


def _variant(
    planned: Planned, model: nn.Module, leaves: Sequence[Any], kind: BackwardKind
) -> Executable:
    """Return the executable for gradients that arrive otherwise, from a recording of their own."""
    args, kwargs = planned.signature.spec.unflatten(list(leaves))
    _log.info("recording another backward: %s", kind)
    with autocast_as(planned.signature.autocast):
        basic = make_B(model, args, kwargs=kwargs, kind=kind)
    graph = planned.network.recorded.with_backward(basic)
    steps = without_idle_steps(graph, planned.plan.steps)
    every = leaves_of(planned.network.graph)
    return executable(graph, steps, planned.network.measured, leaves=every)


def _eager_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
    keep_bits: bool,
) -> StepResult | None:
    """Run one step of the eager twin; None if the device has too little memory for it."""
    twin = twin_of(model)
    try:
        return run_step(twin, twin, args, kwargs, device, keep_bits=keep_bits)
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
    _log.warning(
        "an eager step of %s does not fit on %s, so the planned step is tested for its memory but "
        "not compared with an eager one",
        type(model).__name__,
        device,
    )
    return None


def _is_out_of_memory(error: RuntimeError) -> bool:
    # The CPU's allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def _eager_peak_bytes(eager: StepResult | None, problem: Problem) -> int:
    """Return what a fraction as budget refers to: measured where eager fits, else simulated."""
    if eager is not None:
        return eager.peak_bytes
    return simulate(problem, no_recomputation(problem)).peak_bytes


def _plan_within(problem: Problem, budget_bytes: int, settings: Settings, phases: Phases) -> Plan:
    """Plan with what is left of the budget once the reserve is set aside."""
    aside = settings.reserve_bytes
    with phases.phase("planning"), stopwatch() as parts:
        try:
            plan = make_plan(
                problem,
                budget_bytes - aside,
                effort=settings.effort,
                planner=settings.planner,
                backend=settings.backend,
                progress=lambda _fraction, text: phases.note(text),
            )
        except InfeasibleBudgetError as error:
            if not aside:
                raise
            minimum = error.minimum_bytes + aside
            raise InfeasibleBudgetError(
                f"of the budget of {budget_bytes} bytes, {aside} are set aside as reserve, and in "
                f"the rest {error}. With what is set aside that makes {minimum} bytes",
                asked_bytes=budget_bytes,
                minimum_bytes=minimum,
            ) from None
    # What is neither options, chain nor simulation: segments, whole graph, windows, bound.
    parts["search"] = max(0.0, phases.seconds.pop("planning") - sum(parts.values()))
    phases.seconds.update(parts)
    return plan


def _self_test(
    planned: Planned,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    eager: StepResult | None,
    device: torch.device,
    budget_bytes: int,
) -> int:
    """Run one planned step and compare it with the eager one, if any; return its measured peak."""
    twin = twin_of(model)

    def call(*call_args: Any, **call_kwargs: Any) -> Any:
        leaves = tuple(pytree.tree_leaves((call_args, call_kwargs)))
        basic = planned.network.graph.dataflow.basic
        return planned.run(twin, external_values(basic, twin, leaves), leaves)

    ours = run_step(call, twin, args, kwargs, device)
    if eager is not None:
        compare(eager, ours, type(model).__name__)
    if ours.peak_bytes > budget_bytes:
        raise SelfTestError(
            f"the planned {type(model).__name__} peaked at {ours.peak_bytes} bytes with a budget "
            f"of {budget_bytes} and a prediction of {planned.plan.peak_bytes}. Please report it; a "
            "smaller budget works around it."
        )
    return ours.peak_bytes


def _refuse_nothing_to_do(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    leaves = [x for x in pytree.tree_leaves((args, dict(kwargs))) if isinstance(x, Tensor)]
    if not any(p.requires_grad for p in model.parameters()) and not any(
        x.requires_grad for x in leaves
    ):
        raise UnsupportedModuleError(
            f"nothing in {type(model).__name__} or its inputs requires a gradient, so there is no "
            "backward to plan for. Set requires_grad, or use the module without Rockmate."
        )
    if not model.training:
        raise UnsupportedModuleError(
            f"{type(model).__name__} is in eval mode, which runs the original module unplanned. "
            "Call model.train() before wrapping it."
        )
