"""The request for a plan: one call of a module, which is recorded on first use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from rkgb import RkgbError
from rkgb.capture import AskedKind, for_any_number
from rkgb.device import no_collection
from rkgb.elements import is_inside_any
from rkgb.engine import B_to_D, D_to_S, Sample, device_of, external_values, record, runnable
from rkgb.graphs import PLANNED_PASSES, BackwardKind, BasicGraph
from rkgb.run import RunnableGraph
from rockmate.arguments import Call
from rockmate.comparison.eager import StepResult
from rockmate.errors import UnsupportedModuleError
from rockmate.guards.input_signature import InputSignature
from rockmate.networks.cutting import cut_again
from rockmate.networks.planned import Planned
from rockmate.networks.self_test import self_test
from rockmate.options.options import KnownBlocks
from rockmate.progress import Phases
from rockmate.requests.identity import cache_key, recording_digest
from rockmate.requests.versions import ExpectedKind, can_run_again
from rockmate.settings import Terms, parse_budget

if TYPE_CHECKING:
    from rkgb.rows import Cut, CutGraph

_log = logging.getLogger("rockmate")
PHASES = {  # with the usual share of planning time, for the progress bar
    "capture": 0.12,
    "measurement": 0.25,
    "calibration": 0.03,
    "eager": 0.05,
    "planning": 0.45,
    "self_test": 0.1,
}


@dataclass(frozen=True, eq=False)
class Request:
    """A call without a plan, with the known plans of other calls.

    With `any_number`, floats of the call, and ints at these positions, should be unspecialised, if
    they only enter arithmetic (`Planned.numbers` tells). The step is then recorded twice.
    """

    model: nn.Module
    sample: Sample
    settings: Terms
    phases: Phases
    known: Sequence[Planned] = ()
    blocks: KnownBlocks = field(default_factory=KnownBlocks)
    guards: bool = True
    any_number: frozenset[int] | None = None
    own: nn.Module | None = None  # the user's module, if `model` is a view without its hooks
    losses: bool = True  # if some outputs are scalars, only these get gradients
    is_part: bool = False  # of a model that trains, also while this part is in eval mode
    kind: ExpectedKind | None = None  # of backward; None: at the losses, or at all outputs

    @classmethod
    def of(cls, model: nn.Module, call: Call, settings: Terms, **more: Any) -> Request:
        """Return the request for a call; `more` are other fields by name.

        Raises:
            BudgetFormatError: the budget cannot be read.
            UnsupportedModuleError: there is no backward to plan for.
        """
        parse_budget(settings.budget)
        sample = Sample.of(model, *call)
        phases = {**PHASES, "inductor": 1.0} if settings.compile else PHASES
        made = cls(model, sample, settings, Phases(phases, show=settings.progress), **more)
        refuse_nothing(model, sample, may_be_in_eval=made.is_part)
        return made

    @property
    def recorded(self) -> RunnableGraph:
        """The graph to run."""
        return self._recording[1]

    @property
    def basic(self) -> BasicGraph:
        """The recorded step."""
        return self._recording[0]

    @cached_property
    def digest(self) -> str:
        """The digest of the recording."""
        return recording_digest(self.recorded)

    @cached_property
    def key(self) -> str:
        """The key of the plan in the cache, and among ranks."""
        return cache_key(self.digest, self.model, self.sample.device, self.settings)

    @cached_property
    def _recording(self) -> tuple[BasicGraph, RunnableGraph]:
        """Record the step, and make the graph to run.

        Without a kind, gradients are expected only at the losses. If the forward could not run
        again for other gradients, they are expected at all outputs.
        """
        with self.phases.phase("capture"), no_collection():
            # Other backwards of compiled pieces are slow to make; rows are cut for losses.
            is_for_all = self.settings.compile and not self.settings.split
            if self.kind is not None or not self.losses or is_for_all:
                return self._lowered(self.kind)
            basic, graph = self._lowered(BackwardKind.of_losses)
            if basic.kind.is_of_losses_alone and not can_run_again(graph.graph):
                return self._lowered(None)
            return basic, graph

    def cut(self, how: Cut | None) -> tuple[CutGraph | None, RunnableGraph]:
        """Return the step in pieces of rows, and the graph to run; None: whole."""
        if how is None:
            return None, self.recorded
        external = external_values(self.basic, self.model, self.sample.leaves)
        cut = cut_again(how, self.basic, external)
        return cut, runnable(cut.graph)

    def _lowered(self, kind: AskedKind) -> tuple[BasicGraph, RunnableGraph]:
        basic = self._recorded(kind)
        if self.any_number is not None:
            basic = for_any_number(*(basic, self.model, self.sample, self.any_number, self.own))
        return basic, lowered(basic)

    def _recorded(self, kind: AskedKind) -> BasicGraph:
        """Record; opaque calls of a known plan are not tried again."""
        for other in () if isinstance(kind, ExpectedKind) else self.known:
            basic = other.network.basic
            whole = all(is_inside_any(path, basic.opaque) for path in self.settings.opaque)
            # Other blocks of such a root may have other parts at the same paths.
            there = {path for path, _ in self.model.named_modules(remove_duplicate=False)}
            whole &= bool(basic.opaque) and there.issuperset(basic.opaque)
            if whole and other.signature == InputSignature.of(self.sample):
                try:
                    return record(
                        *(self.model, self.sample, kind),
                        opaque=basic.opaque,
                        guards=self.guards,
                        known=basic,
                    )
                except RkgbError as error:  # this call takes other branches
                    _log.debug("pieces are tried out anew: %s", error)
        opaque, strict = self.settings.opaque, self.settings.strict
        # Libraries may allocate memory at their first calls, so kernels are measured after these.
        is_metered = bool(self.known) and not device_of(self.sample.device).is_asynchronous
        return record(
            *(self.model, self.sample, kind),
            opaque=opaque,
            strict=strict,
            guards=self.guards,
            is_metered=is_metered,
        )


Source = Callable[[Request], Planned | None]  # returns None if it has no plan for a request


def first_of(sources: Sequence[Source], request: Request) -> Planned | None:
    """Return the plan of the first source that has one."""
    found = (source(request) for source in sources)
    return next((planned for planned in found if planned is not None), None)


def tested(
    request: Request, eager: StepResult | None, planned: Planned
) -> tuple[Planned, StepResult]:
    """Run one step of a plan; return the plan with its measurements, and the step.

    It is compared with the plain step `eager`, where there is one.
    """
    with request.phases.phase("self_test"), no_collection():
        ours, found = self_test(planned, request.model, request.sample, eager)
        device_of(request.sample.device).give_back()
    measured_bytes = ours.allocated_peak_bytes
    return replace(planned, measured_peak_bytes=measured_bytes, comparison=found), ours


def lowered(basic: BasicGraph) -> RunnableGraph:
    """Return the graph to run for a recording."""
    return runnable(D_to_S(B_to_D(basic), passes=PLANNED_PASSES))


def refuse_nothing(model: nn.Module, sample: Sample, *, may_be_in_eval: bool = False) -> None:
    """Refuse a call without a backward to plan for.

    Raises:
        UnsupportedModuleError: nothing requires a gradient, or the model is in eval mode.
    """
    wanting = [t for t in (*model.parameters(), *sample.tensors) if t.requires_grad]
    if not wanting:
        raise UnsupportedModuleError(
            f"nothing in {type(model).__name__} or its inputs requires a gradient, so there is no "
            "backward to plan for. Set requires_grad, or use the module without Rockmate."
        )
    if not may_be_in_eval and not any(module.training for module in model.modules()):
        raise UnsupportedModuleError(
            f"{type(model).__name__} is in eval mode, which runs the original module unplanned. "
            "Call model.train() before wrapping it."
        )
