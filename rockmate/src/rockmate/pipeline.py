"""From a module, a sample and a budget to an executor: the whole road, phase by phase.

capture      torch.export -> B -> D -> S            (rkgb)
measurement  time of each class of nodes            (rkgb)
calibration  one metered run of the executor        -> Problem
eager        one metered step of the eager twin     (for a fraction as budget, and the self-test)
planning     options, chain, simulation, search     -> Plan
self_test    one step of the planned module against the twin, bits and bytes
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rkgb.basic import bind_inputs, check_device, external_values, make_B
from rkgb.dataflow import B_to_D
from rkgb.inspect_op import CostSource, FlopCost, MeasuredTime, inspect_graph
from rkgb.op import Ref
from rkgb.runner import Runner
from rkgb.simplified import D_to_S, SimplifiedGraph
from rockmate.budget import Budget, parse_budget
from rockmate.calibrate import Calibration, calibrate
from rockmate.errors import InfeasibleBudgetError, SelfTestError, UnsupportedModuleError
from rockmate.execute import Executor
from rockmate.guards import InputSignature, refuse_hooks
from rockmate.plan import Plan
from rockmate.planners import plan as make_plan
from rockmate.planners.simple import no_recomputation
from rockmate.program import lower
from rockmate.progress import Phases
from rockmate.reference import Step, compare, run_step, twin_of
from rockmate.simulate import simulate
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
class Planned:
    """A module planned for one kind of input."""

    graph: SimplifiedGraph
    calibration: Calibration
    executor: Executor
    plan: Plan
    signature: InputSignature
    output_spec: pytree.TreeSpec
    seconds: Mapping[str, float]
    budget_bytes: int
    eager_peak_bytes: int | None
    measured_peak_bytes: int | None

    def __call__(self, model: nn.Module, leaves: Sequence[Any]) -> Any:
        """Run the planned forward on `model` as it is now; `leaves` passed `signature.check`."""
        return self.run(external_values(self.graph.dataflow.basic, model, tuple(leaves)))

    def run(self, external: Mapping[str, Tensor]) -> Any:
        made = dict(zip(self.graph.output_names, self.executor(external), strict=True))
        results = [
            (made[out.name] if out.name in made else external[out.name])
            if isinstance(out, Ref)
            else out
            for out in self.graph.outputs
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
        rkgb.TraceError, rkgb.UnsupportedOpError: the module cannot be captured exactly.
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
    leaves = tuple(pytree.tree_leaves((args, keywords)))

    with phases.phase("capture"):
        # On a copy: whatever else the forward does in Python, the user's module does not see it.
        bg = make_B(_copy_or_itself(model), args, device, kwargs=keywords)
        graph = D_to_S(B_to_D(bg, model, args, device, kwargs=keywords))
        runner = Runner(graph, device)
    with phases.phase("measurement"):
        source: CostSource = FlopCost() if settings.cost == "flops" else MeasuredTime(device)
        inspection = inspect_graph(
            runner, external_values(bg, model, leaves), source, measure_memory=False
        )
    with phases.phase("calibration"):
        calibration = calibrate(graph, inspection, external_values(bg, model, leaves))
    eager: Step | None = None
    if settings.self_test or fraction is not None:
        with phases.phase("eager"):
            eager = _eager_step(model, args, keywords, device, settings.self_test)
    if fraction is not None:
        budget_bytes = int(fraction * _eager_peak_bytes(eager, calibration))
    assert budget_bytes is not None
    plan = _plan_within(calibration, budget_bytes, settings, phases)
    executor = Executor(
        runner, calibration.problem, lower(calibration.problem, plan), calibration.layout
    )
    planned = Planned(
        graph=graph,
        calibration=calibration,
        executor=executor,
        plan=plan,
        signature=signature,
        output_spec=bg.output_spec,
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


def _eager_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
    keep_bits: bool,
) -> Step | None:
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


def _eager_peak_bytes(eager: Step | None, calibration: Calibration) -> int:
    """Return what a fraction as budget refers to: measured where eager fits, else simulated."""
    if eager is not None:
        return eager.peak_bytes
    return simulate(calibration.problem, no_recomputation(calibration.problem)).peak_bytes


def _plan_within(
    calibration: Calibration, budget_bytes: int, settings: Settings, phases: Phases
) -> Plan:
    """Plan with what is left of the budget once reserve and margin are set aside."""
    aside = settings.reserve_bytes + calibration.margin_bytes
    with phases.phase("planning"), stopwatch() as parts:
        try:
            plan = make_plan(
                calibration.problem,
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
                f"of the budget of {budget_bytes} bytes, {aside} are set aside (reserve, and what "
                f"calibration could not attribute), and in the rest {error}. With what is set "
                f"aside that makes {minimum} bytes",
                asked_bytes=budget_bytes,
                minimum_bytes=minimum,
            ) from None
    # What is neither options, chain nor simulation: segments, whole graph, windows, bound.
    parts["search"] = max(0.0, phases.seconds.pop("planning") - sum(parts.values()))
    phases.seconds.update(parts)
    return plan


def _copy_or_itself(model: nn.Module) -> nn.Module:
    try:
        return twin_of(model)
    except UnsupportedModuleError:
        return model


def _self_test(
    planned: Planned,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    eager: Step | None,
    device: torch.device,
    budget_bytes: int,
) -> int:
    """Run one planned step and compare it with the eager one, if any; return its measured peak."""
    twin = twin_of(model)

    def call(*call_args: Any, **call_kwargs: Any) -> Any:
        leaves = tuple(pytree.tree_leaves((call_args, call_kwargs)))
        return planned.run(external_values(planned.graph.dataflow.basic, twin, leaves))

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
