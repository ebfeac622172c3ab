"""Record another call of a module, and follow what was planned for calls before, where that does.

A recording that differs from a known one in numbers takes its steps; one that differs in sizes gets
a plan that follows from those for other sizes. The recording is made for the gradients that came
last (`versions`); where nothing is to be followed, the usual ones are recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from rkgb import RkgbError
from rkgb.capture import AskedKind, for_any_number, no_collection
from rkgb.engine import B_to_D, D_to_S, Sample, device_of, record, runnable
from rkgb.graphs import PLANNED_PASSES, BackwardKind, BasicGraph, same_but_for_numbers
from rkgb.opaque import is_inside
from rkgb.run import RunnableGraph
from rockmate.keys.input_signature import InputSignature
from rockmate.networks.planned import Planned, with_other_numbers
from rockmate.options.known_blocks import KnownBlocks
from rockmate.pipeline.resized import can_be_resized, planned_anew, resized
from rockmate.pipeline.versions import (
    ExpectedKind,
    can_run_again,
    has_same_nodes,
    versions_like,
)
from rockmate.progress import Phases
from rockmate.settings import Terms

_log = logging.getLogger("rockmate")


@dataclass(frozen=True)
class Call:
    """A call that no plan is for yet, and what is known of others.

    With `any_number`, the plan is to be for all floats in the place of the call's, and all ints in
    the place of these leaves, if they only enter arithmetic; then the step is recorded twice.
    """

    model: nn.Module
    sample: Sample
    settings: Terms
    phases: Phases
    known: Sequence[Planned]
    blocks: KnownBlocks
    guards: bool
    any_number: frozenset[int] | None = None
    own: nn.Module | None = None  # the user's, where `model` is one without its hooks
    losses: bool = True  # of outputs among which there are scalars, these alone get gradients

    def record(self, kind: ExpectedKind | None = None) -> tuple[BasicGraph, RunnableGraph]:
        """Return the recording of the step, and its graph as it is run.

        Without a kind, gradients are taken to come to the losses alone, but where others could not
        be served later: there the forward cannot run again for them.
        """
        with self.phases.phase("capture"), no_collection():
            if kind is not None or not self.losses or self.settings.compile:
                return self._runnable(kind)
            basic, graph = self._runnable(BackwardKind.of_losses)
            if basic.kind.is_of_losses_alone and not can_run_again(graph.graph):
                return self._runnable(None)
            return basic, graph

    def _runnable(self, kind: AskedKind) -> tuple[BasicGraph, RunnableGraph]:
        basic = self._recorded(kind)
        if self.any_number is not None:
            basic = for_any_number(*(basic, self.model, self.sample, self.any_number, self.own))
        return basic, runnable(D_to_S(B_to_D(basic), passes=PLANNED_PASSES))

    def _recorded(self, kind: AskedKind) -> BasicGraph:
        """Record; what runs whole is not tried out again where a known plan has it."""
        for other in () if isinstance(kind, ExpectedKind) else self.known:
            basic = other.network.graph.dataflow.basic
            whole = all(
                any(is_inside(path, around) for around in basic.opaque)
                for path in self.settings.opaque
            )
            if basic.opaque and whole and other.signature == InputSignature.of(self.sample):
                try:
                    return record(
                        *(self.model, self.sample, kind),
                        opaque=basic.opaque,
                        guards=self.guards,
                        known=basic,
                    )
                except RkgbError as error:  # it goes another way here
                    _log.debug("pieces are tried out anew: %s", error)
        opaque, strict = self.settings.opaque, self.settings.strict
        # Where libraries take memory at their first calls, kernels are measured after these.
        is_metered = bool(self.known) and not device_of(self.sample.device).is_asynchronous
        return record(
            *(self.model, self.sample, kind),
            opaque=opaque,
            strict=strict,
            guards=self.guards,
            is_metered=is_metered,
        )

    def with_expected_gradients(self) -> Planned | None:
        """Return a plan that follows, made for the gradients that came last; None if none does."""
        if not can_be_resized(self.settings):
            return None
        expected = ExpectedKind.after(self.known)
        if expected is None or expected.is_usual(losses=self.losses):
            return None
        with no_collection():
            _, recorded = self.record(expected)
            planned = self.with_other_numbers(recorded)
            return self.resized(recorded) if planned is None else planned

    def with_other_numbers(self, recorded: RunnableGraph) -> Planned | None:
        """Return a plan with the steps of a known one, if only numbers differ."""
        graph, basic = recorded.graph, recorded.graph.dataflow.basic
        for version in versions_like(self.known, basic):
            if version.is_apart:
                continue
            known = version.graph
            same = same_but_for_numbers(basic, known.dataflow.basic)
            if same and has_same_nodes(graph, known):
                planned = with_other_numbers(
                    version.planned, known, recorded, self.sample, self.phases
                )
                self.phases.close("planned before")
                return planned
        return None

    def resized(self, recorded: RunnableGraph) -> Planned | None:
        """Return a plan that follows from those for other sizes; None where none does."""
        with no_collection():
            planned = resized(
                *(self.known, self.model, recorded, self.sample),
                *(self.settings, self.phases, self.blocks),
            )
        if planned is not None:
            self.phases.close("planned before")
        return planned

    def ready_for_others(self, planned: Planned) -> Planned:
        """Return a plan that was made for losses alone such that other gradients may come, too."""
        kind = planned.network.graph.dataflow.basic.kind
        if planned.other_gradients is not None or not kind.is_of_losses_alone:
            return planned
        room_bytes = planned.budget_bytes - self.settings.reserve - planned.blocks_bytes
        anew = partial(planned_anew, room_bytes, self.settings, self.blocks)
        return replace(planned, other_gradients=anew)
