"""The forward of a planned module: look up the plan for the call, or make one, and run it."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rkgb import OpaquePieceError, OtherWayError, TraceError
from rkgb.elements import is_running
from rkgb.engine import Sample
from rkgb.opaque import StartOfCall
from rkgb.safeguards import refuse_lazy_modules
from rkgb.torch_api import is_transforming
from rockmate.errors import (
    InfeasibleBudgetError,
    PlanFileError,
    RockmateError,
    UnsupportedModuleError,
)
from rockmate.files.plan_file import PlanFile
from rockmate.keys.input_signature import ambient, in_order, key_of
from rockmate.keys.module_state import ExternalValues, ModuleWatch, Snapshot, without_hooks
from rockmate.keys.sharded import settled_call, whole_parts
from rockmate.networks import Planned
from rockmate.options.known_blocks import KnownBlocks
from rockmate.pipeline import (
    Shelf,
    eager_peak_bytes,
    is_follower,
    plan_file_of,
    plan_module,
    sharing,
    shelf_of,
)
from rockmate.plan_cache import Family, Key, PlanCache, PlanRow, what
from rockmate.runtime.plain import is_plain, plain
from rockmate.settings import Settings, parse_budget

_log = logging.getLogger("rockmate")
_MOST_WAYS = 6  # through one forward, chosen by values of its inputs, that have plans
_MANY = 8  # recordings one after the other for numbers that change
_MOST_TRIES = 4  # to make a plan for all numbers
_planning = threading.RLock()  # one at a time: a recording watches over all of torch
Call = tuple[tuple[Any, ...], Mapping[str, Any]]


class PlannedForward:
    """Runs the forward of `model` within a budget; `model` itself is the plain module."""

    plans_alone = True  # without the other processes over which parameters may be spread

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.table = vars(model)
        self.plans = PlanCache(settings.max_plans)
        self.blocks = KnownBlocks()
        self.watch = ModuleWatch(model)
        self.known: tuple[Planned, ...] = ()  # of modules like this one, whose steps serve here
        self.forward: Any = None  # what a user has put over the planned forward
        self.first: Planned | None = None
        self._shelf: Shelf | None = None  # of plans that were made before
        self._has_told = False  # that checkpoints inside are taken off
        self._in_a_row = 0  # recordings for nothing but other numbers
        self._tried: dict[Key | None, int] = {}  # how often no plan could be for any number

    def __reduce__(self) -> Any:
        """Leave plans out of copies and files of the plain module, whose attribute this is."""
        return type(None), ()

    def take_plans_of(self, other: PlannedForward) -> None:
        """Serve a copy of the other's module: what was planned for it as it is now holds here."""
        self._shelf, self.known = other._shelf, other.known
        autocast, _ = ambient()
        ours, theirs = self.watch.now(autocast).state, other.watch.now(autocast).state
        if tuple(ours.facts.items()) == tuple(theirs.facts.items()):
            for key, family in other.plans.families.items():
                if key.state is theirs:
                    self.plans.put(replace(key, state=ours), family)
            self.first = other.first

    # ------------------------------------------------------------------ a call

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module: planned where it trains, as it is where it does not."""
        if not torch.is_grad_enabled() or is_plain() or is_transforming():
            return self.model.forward(*args, **kwargs)
        autocast, flags = ambient()
        snapshot = self.watch.now(autocast)
        state = snapshot.state
        if not state.trains:
            return self.model.forward(*args, **kwargs)
        ordered = in_order(kwargs)
        leaves, inputs = key_of(args, ordered)
        if type(inputs) is not tuple and any(map(is_running, leaves)):
            return self(*settled_call(args, kwargs))
        if not state.wants and not _any_wants(leaves):
            return self.model.forward(*args, **kwargs)
        key = Key(state, inputs, autocast, flags)
        family = self.plans.get(key) or self.plans.for_any_number(key, leaves)
        if family is None:
            family = self._plan(key, (args, ordered))
            snapshot = self.watch.now(autocast)
        planned = family.variants[0]
        external = self._values(snapshot, planned).now(tuple(leaves))
        if planned.outcomes.basic.reads:
            planned = self._variant(family, snapshot, leaves, (args, ordered))
            external = self._values(snapshot, planned).now(tuple(leaves))
        if planned.may_go_another_way:
            return self._with_pieces(planned, external, leaves, args, kwargs)
        return planned.run(self.model, external, leaves, call=(args, kwargs))

    def _with_pieces(
        self,
        planned: Planned,
        external: Mapping[str, Tensor],
        leaves: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a plan with submodules that run whole; the plain module where one comes otherwise."""
        start = StartOfCall(self.model, planned.signature.device)
        try:
            return planned.run(self.model, external, leaves, call=(args, kwargs))
        except (OpaquePieceError, OtherWayError) as error:
            start.restore()
            result = self.model.forward(*args, **kwargs)  # or the user's own error
            warnings.warn(
                f"{error} This step runs plain, and may take more memory than the budget.",
                RuntimeWarning,
                stacklevel=4,
            )
            return result

    def _values(self, snapshot: Snapshot, planned: Planned) -> ExternalValues:
        values = snapshot.values.get(planned.executor)
        if values is None:
            basic = planned.network.graph.dataflow.basic
            values = snapshot.values[planned.executor] = ExternalValues(basic, self.model)
        return values

    # ------------------------------------------------------------------ planning

    def prepare(self, calls: Sequence[Call]) -> None:
        """Plan for calls to come; a fraction as budget becomes bytes, by the largest of them.

        Raises:
            InfeasibleBudgetError, UnsupportedModuleError, rkgb.RkgbError: see `plan_module`.
        """
        share = self.settings.share and not self.settings.compile  # each compiles for itself
        own: list[Shelf] = []

        def find_own() -> Shelf:
            own.append(_own_shelf(self.settings, is_follower(share)))
            return own[0]

        with sharing(find_own, share) as self._shelf:
            # What is copied or pickled later goes elsewhere, where the file may not be.
            self.settings = replace(self.settings, plan=None)
            self._prepare(calls)
        self._shelf = own[0]  # later calls come when they come, not on all ranks at once

    def _prepare(self, calls: Sequence[Call]) -> None:
        with _planning, torch.inference_mode(False), torch.enable_grad():
            calls = [_usable(self.model, call) for call in calls]
            _, fraction = parse_budget(self.settings.budget)
            if fraction is not None and len(calls) > 1:
                bare = without_hooks(self.model, type(self.model))
                with plain():
                    peaks = [eager_peak_bytes(bare, *call) for call in calls]
                self.settings = replace(self.settings, budget=int(fraction * max(peaks)))
            for args, kwargs in calls:
                ordered = in_order(kwargs)
                autocast, flags = ambient()
                _, inputs = key_of(args, ordered)
                key = Key(self.watch.now(autocast).state, inputs, autocast, flags)
                if self.plans.get(key) is None:
                    self._plan(key, (args, ordered))

    def _plan(self, key: Key, call: Call) -> Family:
        """Plan for a key that no plan is for, within the same bytes."""
        with _planning:
            family = self.plans.get(key)
            if family is not None:  # another thread has planned it
                return family
            last = self.plans.last_key()
            why = "the sample" if last is None else key.unlike(last)
            _log.debug("planning: %s", why)
            began = time.perf_counter()
            any_number = self._may_be_for_any_number(key)
            planned = self._planned(call, why, any_number=any_number)
            if any_number is not None:
                key, why = self._for_any_number(key, any_number, why, planned)
            seconds = time.perf_counter() - began
            peak = planned.plan.peak_bytes
            budget, again = planned.budget_bytes, planned.plan.overhead
            row = PlanRow(what(key), why, planned.how, seconds, peak, budget, again)
            _log.info("%s", row)
            served = planned.how != "recorded" or planned.numbers is not None
            self._in_a_row = 0 if served else self._in_a_row + 1
            if self._in_a_row == _MANY:
                _log.warning(
                    "%d new values were met one after the other (the last: %s); each is recorded "
                    "in the time of a few steps. Pass a number that changes at every step as a "
                    "tensor",
                    _MANY,
                    why,
                )
            family = self._family(key, planned, row)
            if self.watch.ignore(planned.network.opaque, planned.assigned):
                autocast, _ = ambient()
                key = replace(key, state=self.watch.now(autocast).state)
            if self.plans.put(key, family):
                self.watch.forget(self.plans.states())
            return family

    def _may_be_for_any_number(self, key: Key) -> frozenset[int] | None:
        """Return which ints a call has otherwise than one that differs in numbers only.

        None where there is none before it, or where a plan for any number was tried in vain.
        """
        whole = self.plans.ints_unlike(key) if self.plans_alone else None
        if whole is None or self._tried.get(key.for_any_number(whole), 0) >= _MOST_TRIES:
            return None
        return whole

    def _for_any_number(
        self, key: Key, whole: frozenset[int], why: str, planned: Planned
    ) -> tuple[Key, str]:
        """Return the key that was planned for, and why: that of all numbers, if it was."""
        general = key.for_any_number(whole)
        assert general is not None
        if planned.numbers is not None:
            self.plans.look_for(whole)
            return general, "numbers that only enter arithmetic"
        self._tried[general] = self._tried.pop(general, 0) + 1
        while len(self._tried) > self.plans.most:
            del self._tried[next(iter(self._tried))]
        return key, why

    def _family(self, key: Key, planned: Planned, row: PlanRow) -> Family:
        """Return a family with a plan, and those for numbers that go another way."""
        known = self.plans.get(key)
        others = [] if known is None else known.variants
        return Family([planned, *others][:_MOST_WAYS], row)

    def _variant(
        self, family: Family, snapshot: Snapshot, leaves: Sequence[Any], call: Call
    ) -> Planned:
        """Return the plan for calls whose inputs lead the forward where these do."""

        def look_up(planned: Planned) -> Mapping[str, Tensor]:
            return self._values(snapshot, planned).now(tuple(leaves))

        planned = family.fitting(look_up)
        if planned is None:
            with _planning:
                why = "values of the inputs that the forward looks at"
                # After some ways, what looks at values is run whole rather than followed again.
                guards = len(family.variants) < _MOST_WAYS
                planned = self._planned(call, why, guards=guards)
                _log.info("planned for other %s: %s", why, "; ".join(planned.outcomes.texts[:3]))
                family.variants.insert(0, planned)
                del family.variants[_MOST_WAYS:]
        return planned

    def _planned(
        self,
        call: Call,
        why: str,
        *,
        guards: bool = True,
        any_number: frozenset[int] | None = None,
    ) -> Planned:
        bare = without_hooks(self.model, type(self.model))
        self._tell_of_checkpoints()
        if self.plans_alone and (parts := whole_parts(bare)):
            raise UnsupportedModuleError(
                f"parameters of '{parts[0]}' in {type(self.model).__name__} are spread over "
                "processes, which would have to run the collectives of a plan in one order. Plan "
                "its blocks: rockmate.apply_to_blocks(model, sample, budget)."
            )
        try:
            if self._shelf is None:
                self._shelf = shelf_of(self.settings)
            with plain():  # planned modules inside belong to this plan
                known = (*self.plans, *self.known)
                planned = plan_module(
                    *(bare, *call, self.settings, known, self.blocks),
                    guards=guards,
                    shelf=self._shelf,
                    any_number=any_number,
                )
                if planned.how == "planned":  # others are made for the gradients that came last
                    planned.foresee(bare, Sample.of(bare, *call).leaves)
        except TraceError as error:
            # An assert on values, an index out of range: the user's own error, as without us.
            if self.first is None or error.__cause__ is None:
                raise
            raise error.__cause__ from None
        except InfeasibleBudgetError as error:
            if self.first is None:
                raise
            raise InfeasibleBudgetError(
                f"for a call of another kind than before ({why}): {error}",
                asked_bytes=error.asked_bytes,
                minimum_bytes=error.minimum_bytes,
            ) from None
        if self.first is None:
            self.first = planned
            # Later plans get the same bytes, whatever a fraction of *their* eager peak would be.
            self.settings = replace(self.settings, budget=planned.budget_bytes)
        return planned

    def _tell_of_checkpoints(self) -> None:
        wanted = (getattr(m, "gradient_checkpointing", False) for m in self.model.modules())
        if not self._has_told and any(value is True for value in wanted):
            self._has_told = True
            _log.info(
                "gradient checkpointing inside %s is taken off: the plan decides what is "
                "recomputed",
                type(self.model).__name__,
            )

    def plan_file(self) -> PlanFile:
        """Return what was planned as a file holds it, the plan for the sample first."""
        first = self.planned
        others = [planned for planned in self.plans if planned is not first]
        return plan_file_of([first, *others], self.model)

    @property
    def planned(self) -> Planned:
        """The first plan.

        Raises:
            RockmateError: there is none yet.
        """
        if self.first is None:
            raise RockmateError(
                "this Rockmate module has not been planned here yet: it was loaded from a file, or "
                "applied without a sample. Run one training step first."
            )
        return self.first


def _own_shelf(settings: Settings, follows: bool) -> Shelf:
    """Return the shelf that settings name; a file may lie on the machine of rank 0 only.

    Raises:
        PlanFileError: the file that was given cannot be read.
    """
    try:
        return shelf_of(settings)
    except PlanFileError:
        if not follows:
            raise
        return shelf_of(replace(settings, plan=None))


def _any_wants(leaves: Sequence[Any]) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


def _usable(model: nn.Module, call: Call) -> Call:
    """Return a call whose tensors autograd may save, whatever mode they were made in."""
    refuse_lazy_modules(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            raise UnsupportedModuleError(
                f"'{name}' of {type(model).__name__} was made under torch.inference_mode(), and "
                "cannot be trained. Make the module outside of it."
            )
    args, kwargs = call
    sample = Sample.of(model, tuple(args), kwargs)
    if not any(tensor.is_inference() for tensor in sample.tensors):
        return call

    def copied(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf

    usable = sample.with_leaves(tuple(map(copied, sample.leaves)))
    return usable.args, usable.kwargs
