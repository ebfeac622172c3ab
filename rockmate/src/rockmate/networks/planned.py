"""A planned module: the compiled plan of a network, and how a step runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from rkgb import OtherWayError, RkgbError
from rkgb.costs import op_key
from rkgb.elements import (
    Assertion,
    Assign,
    ContainerMutation,
    Effect,
    InputMutation,
    Numbers,
    ObserverHook,
    Ref,
    Structure,
    is_inside_any,
    target_of,
)
from rkgb.engine import Sample, operations
from rkgb.graphs import BackwardKind, SimplifiedGraph
from rkgb.run import Outcomes, RunnableGraph
from rkgb.torch_api import has_saved_hooks
from rockmate.comparison.contents import Contents
from rockmate.errors import OtherForwardError, RockmateError
from rockmate.guards.input_signature import InputSignature
from rockmate.networks.executables import executable, planned_executable, steps_of, without_reruns
from rockmate.networks.likely import kinds_of_sums, likely_kinds
from rockmate.networks.network import Network
from rockmate.networks.variants import Replan, fits_into_a_step, variant_of
from rockmate.planners import minimum_peak
from rockmate.problems.problem import Problem
from rockmate.progress import Phases
from rockmate.reports.plan_report import CompiledPart
from rockmate.runtime.executable import Executable
from rockmate.runtime.execute import Executor
from rockmate.schedules.plan import Plan
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import end_of_forward

if TYPE_CHECKING:
    from rkgb.rows import CutGraph

_log = logging.getLogger("rockmate")


@dataclass(frozen=True)
class Planned:
    """A module planned for one kind of input.

    `how` is its origin: "planned" anew; "recorded", with the steps of a plan whose program differs
    only in numbers; "resized" from plans whose programs differ only in sizes.
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
    blocks_bytes: int = 0  # reserved for rounding by the allocator to whole blocks
    family: object = field(default_factory=object)  # shared by plans that differ only in sizes
    comparison: str = ""  # result of the self-test, if bits cannot be equal
    most_kept_bytes: int | None = None  # of a module among others, from its forward to its backward
    other_gradients: Replan | None = None  # of a plan for gradients at only some outputs
    accumulating: Planned | None = None  # for steps that begin when gradients exist already

    @property
    def problem(self) -> Problem:
        """The problem that was planned."""
        return self.network.problem

    @cached_property
    def outcomes(self) -> Outcomes:
        """The guards of the recorded forward."""
        return Outcomes(self.network.basic)

    @property
    def is_for_losses(self) -> bool:
        """Whether it was planned for gradients of losses only."""
        return self.network.basic.kind.is_of_losses

    @property
    def numbers(self) -> Numbers | None:
        """The unspecialised numbers of a call, if the plan has any."""
        return self.network.basic.numbers

    @property
    def effects(self) -> tuple[Effect, ...]:
        """The side effects of a step."""
        return self.network.basic.effects

    @property
    def written(self) -> tuple[str, ...]:
        """The parameters that the forward writes to."""
        return self.network.basic.written_parameters

    def writes_buffer(self, name: str) -> bool:
        """Return whether the forward writes to a buffer; an opaque call may write to all of its."""
        found, parts = self._written_buffers
        return name in found or is_inside_any(name, parts)

    @cached_property
    def _written_buffers(self) -> tuple[frozenset[str], tuple[str, ...]]:
        basic, executable = self.network.basic, self.executor.planned
        found = {basic.buffers[name] for name in executable.written if name in basic.buffers}
        return frozenset(found), tuple(w.path for w in basic.whole_calls if w.buffer_bytes)

    @cached_property
    def may_go_another_way(self) -> bool:
        """Whether a step may find that a guard fails."""
        checks = any(isinstance(effect, (Assertion, InputMutation)) for effect in self.effects)
        basic = self.network.basic
        return checks or basic.catches or bool(basic.whole_calls)

    @cached_property
    def may_replace(self) -> bool:
        """Whether a step may put another object at the place of one, such as a buffer."""
        return bool(self.assigned or self.network.basic.whole_calls)

    @cached_property
    def runs_parts_again(self) -> bool:
        """Whether a recomputation runs parts that run whole."""
        planned = self.executor.planned
        return planned.runs_python and planned.program.runs_again

    @cached_property
    def is_plain(self) -> bool:
        """Whether the root runs whole: its step is plain PyTorch's, and takes as much memory."""
        return self.network.basic.opaque == ("",)

    @property
    def assigned(self) -> tuple[tuple[str, str], ...]:
        """Attributes that every step sets: path of the submodule, and name."""
        return tuple((e.path, e.name) for e in self.effects if isinstance(e, Assign))

    def foresee(self, model: nn.Module, leaves: Sequence[Any]) -> None:
        """Record likely backwards in advance, while no step holds memory.

        For example, a model that returns its loss and its logits is trained on the loss. A
        recording during the first backward would need memory on top of the step's.

        Raises:
            OtherForwardError: the forward runs other operations now than when it was planned.
        """
        if self.network.compiled is not None:  # slow; such a step recomputes its forward instead
            return
        basic = self.network.basic
        variants = self.executor.variants
        # The gradient of a sum or mean is recorded when it arrives, if that fits into the budget.
        sums = (kind for kind in kinds_of_sums(basic) if not fits_into_a_step(self, kind))
        for kind in (*likely_kinds(basic), *sums):
            try:
                if kind not in variants:
                    variants[kind] = variant_of(self, model, leaves, kind, in_a_step=False)
            except OtherForwardError:
                raise
            except RockmateError as error:  # it may never be needed
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
        """Run the planned forward; `model` and `leaves` are needed to record other gradients.

        Without `looks`, observer hooks of submodules are not called, and contents are not compared.
        The arguments of `call` are mutated as the forward mutates them.
        """

        def variant(kind: BackwardKind) -> Executable:
            return variant_of(self, model, leaves, kind)

        names = self.executor.expected.program.outputs
        # Without the tensors, which the step would keep alive.
        numbers = (
            () if self.numbers is None else [x if type(x) in (float, int) else None for x in leaves]
        )
        keep = None
        if looks and not _is_captured(self.signature.device):
            keep = _all_contents if self.executor.is_due(model) else _contents_of_few
            self.executor.expected.warn_of_order(external)
        try:
            outputs = self.executor(external, variant, model, numbers, keep)
        except (RkgbError, RockmateError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            if not self.network.basic.catches:
                raise
            raise OtherWayError(
                f"an operation has raised {type(error).__name__}, which the forward may catch: "
                f"{str(error).rstrip('.')}."
            ) from error
        made = dict(zip(names, outputs, strict=True))
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
            if isinstance(effect, InputMutation):
                effect.apply(leaves, value)
            elif isinstance(effect, ContainerMutation):
                if call is not None:
                    effect.apply(*call, value)
            elif looks or not isinstance(effect, ObserverHook):
                effect.apply(model, value)
        if has_saved_hooks():  # a checkpoint's second run stops where as much has been saved
            torch.empty(0, requires_grad=True, device="cpu").exp()
        return result


def _is_captured(device: torch.device) -> bool:
    """Return whether a CUDA graph is captured: nothing can be read then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _all_contents(
    executable: Executable, external: Mapping[str, Tensor], python: Mapping[str, Tensor]
) -> Callable[[], str] | None:
    return Contents.kept({**{name: external[name] for name in executable.reads_again}, **python})


def _contents_of_few(
    executable: Executable, external: Mapping[str, Tensor], python: Mapping[str, Tensor]
) -> Callable[[], str] | None:
    others = {name: t for name, t in python.items() if not isinstance(t, nn.Parameter)}
    others |= {name: external[name] for name in executable.others_again}
    return Contents.kept_of_few(others)


def compiled_part(planned: Planned) -> CompiledPart | None:
    """Return the compiled part of a plan, for its report, or None without compilation."""
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


def cut_parts(planned: Planned) -> tuple[str, ...]:
    """Return the parts of a plan in pieces of rows, and their agreement with eager, in words."""
    cut = planned.network.cut
    if cut is None:
        return ()
    is_told = planned.network.compiled is not None  # along with what is compiled
    near = [f"  {planned.comparison}"] if planned.comparison and not is_told else []
    return (*(f"cut: {node}" for node in cut.nodes), *near)


def compiled_plan(
    network: Network, plan: Plan, sample: Sample, budget_bytes: int, phases: Phases
) -> Planned:
    """Return a plan with its compiled program, which has not run yet."""
    return Planned(
        network=network,
        executor=_executor(network, plan, budget_bytes),
        plan=plan,
        signature=InputSignature.of(sample),
        outputs=network.basic.output_spec,
        seconds=phases.seconds,
        budget_bytes=budget_bytes,
        eager_peak_bytes=None,
        measured_peak_bytes=None,
    )


def with_least_peak(planned: Planned) -> Planned:
    """Return the same recording with the plan of least peak, if that is another one."""
    network, before = planned.network, planned.plan
    steps, peak_bytes = minimum_peak(network.problem)
    if peak_bytes >= before.peak_bytes:
        return planned
    plan = replace(before.with_steps(network.problem, steps), planner="minimum peak")
    plan = without_reruns(network, plan)
    executor = _executor(network, plan, planned.budget_bytes)
    return replace(planned, executor=executor, plan=plan, accumulating=None)


def _executor(network: Network, plan: Plan, budget_bytes: int) -> Executor:
    program, room_bytes = planned_executable(network, plan), 0
    if program.outputs.leaving:
        during = simulate(network.problem, plan.steps, plan.moves).peak_during
        in_backward = during[end_of_forward(plan.steps, len(network.problem.nodes)) :]
        room_bytes = budget_bytes - max(in_backward, default=0)
    return Executor(program, room_bytes)


def with_other_numbers(
    planned: Planned,
    graph: SimplifiedGraph,
    recorded: RunnableGraph,
    sample: Sample,
    phases: Phases,
    *,
    cut: CutGraph | None = None,
) -> Planned:
    """Return a plan with the program of another recording, and everything else unchanged.

    `graph` is the plan's graph; the recording differs from it only in numbers.
    """
    old = planned.network
    basic = recorded.graph.basic
    pairs = zip(operations(recorded.graph), operations(graph), strict=True)
    infos = basic.infos
    kinds = {op_key(op, infos): (op, op_key(known, infos)) for op, known in pairs}
    costs, chosen = old.measured.costs, old.measured.callees
    measured = replace(
        old.measured,
        # A backward for other gradients has kinds that were not measured.
        costs={new: costs[key] for new, (_, key) in kinds.items() if key in costs},
        callees={  # pieces hold their own numbers
            new: op.target if target_of(op).recorded else chosen[key]
            for new, (op, key) in kinds.items()
            if key in chosen
        },
    )
    network = replace(old, recorded=recorded, graph=recorded.graph, measured=measured, cut=cut)
    if graph is old.graph:
        program = planned_executable(network, planned.plan)
    else:  # the plan's problem is for other gradients
        steps, moves = steps_of(network, recorded.graph, planned.plan)
        program = executable(
            *(recorded.graph, steps, measured), moves=moves, offload=network.offload
        )
    return replace(
        planned,
        network=network,
        executor=Executor(program, planned.executor.room_bytes),
        signature=InputSignature.of(sample),
        outputs=basic.output_spec,
        seconds=phases.seconds,
        how="recorded",
    )
