"""Make plans for the calls of a module that none is for, within the same bytes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rkgb import RkgbError, TraceError
from rkgb.engine import Sample
from rkgb.opaque import is_inside
from rkgb.safeguards import Setting, refuse_lazy_modules
from rkgb.torch_api import changing_modes, compiled_modules, placed_parameters, unwatched
from rockmate.arguments import Call
from rockmate.errors import (
    InfeasibleBudgetError,
    PlanFileError,
    RockmateError,
    UnsupportedModuleError,
)
from rockmate.files.plan_file import PlanFile
from rockmate.keys.changing_places import ChangingPlaces, readers
from rockmate.keys.input_signature import ambient, in_order, key_of
from rockmate.keys.module_state import ModuleState, Place
from rockmate.keys.module_watch import ModuleWatch, without_hooks
from rockmate.keys.sharded import whole_parts
from rockmate.networks import Planned
from rockmate.options.known_blocks import KnownBlocks
from rockmate.pipeline import (
    GivenFile,
    Request,
    Source,
    eager_peak_bytes,
    given_file,
    is_follower,
    plan_file_of,
    planned_for,
    sharing,
    sources_of,
)
from rockmate.plan_cache import Family, Key, PlanCache, PlanRow, PlanRows, what
from rockmate.runtime.plain import unseen
from rockmate.settings import Terms, parse_budget
from rockmate.whole_step import CallBytes, Memory

_log = logging.getLogger("rockmate")
_MOST_WAYS = 6  # through one forward, chosen by values of its inputs, that have plans
_MANY = 8  # recordings one after the other for numbers that change
_LOOKS = 2  # at calls that were planned ahead
_MOST_TRIES = 4  # to make a plan for all numbers
_MOST_NAMED = 3  # compiled modules, in the log
_TOO_LITTLE = 1  # budget, to be told the smallest
# What is said where torch.compile is taken off.
INSTEAD = "its operations are planned one by one; compile=True compiles what is planned"
_CHANGES = (
    "what Python reads has another value at every step: %s. What reads it runs whole from now on, "
    "so that nothing is recorded for it: %s. Pass it as an argument, or keep it as an attribute of "
    "the module"
)
planning = threading.RLock()  # one at a time: a recording watches over all of torch


class HandedOverOtherwiseError(Exception):
    """Calls hand over other attributes from now on, so that this one has another key."""


class PlansOfModule:
    """Plans for the calls of `model`, the plain module, within one budget."""

    losses = False  # whether only scalars, where there are some, are taken to get gradients
    plans_alone = True  # without the other processes over which parameters may be spread

    def __init__(self, model: nn.Module, settings: Terms) -> None:
        self.model, self.settings = model, settings
        self.table = vars(model)
        self.plans = PlanCache(settings.max_plans)
        self.blocks = KnownBlocks()
        self.watch = ModuleWatch(model)
        self.known: tuple[Planned, ...] = ()  # of modules like this one, whose steps serve here
        self.first: Planned | None = None
        self._sources: tuple[Source, ...] = ()  # of plans; none before the first
        self.call_bytes: CallBytes | None = None  # of the sample, where memory was given
        self._settings: list[Setting] = []  # what the plain forward sets at its first call
        self._told: set[str] = set()  # what is taken off
        self.changing = ChangingPlaces()
        self._in_a_row = 0  # recordings for nothing but other numbers
        self._because = ""  # the next plan is made
        self._tried: dict[Key | None, int] = {}  # how often no plan could be for any number
        self._in_vain: dict[Place, int] = {}  # the same of an attribute

    def take_plans_of(self, other: PlansOfModule) -> None:
        """Serve a copy of the other's module: what was planned for it as it is now holds here."""
        self._sources, self.known = other._sources, other.known
        self.watch.hand_over(other.watch.open)
        self.watch.read(other.watch.sources)
        autocast, _ = ambient()
        ours, theirs = self.watch.now(autocast).state, other.watch.now(autocast).state
        if tuple(ours.facts.items()) == tuple(theirs.facts.items()):
            for key, family in other.plans.families.items():
                if key.state is theirs:
                    self.plans.put(replace(key, state=ours), family)
            ours.kept.update(theirs.kept)
            self.first = other.first

    def run_whole(self, paths: Iterable[str], why: str) -> None:
        """Run these submodules whole from now on; plans that were made otherwise are dropped.

        `why` says what no recording of them can know.

        Raises:
            UnsupportedModuleError: no part may be run whole (`strict=True`).
        """
        paths = tuple(dict.fromkeys(paths))
        with planning:
            if self.settings.strict:
                named = ", ".join(f"'{path or '(root)'}'" for path in paths)
                raise UnsupportedModuleError(
                    f"{named} of {type(self.model).__name__} cannot be recorded: {why}. "
                    "strict=True lets no part run whole; without it these would."
                )
            others = (p for p in self.settings.opaque if not _is_covered(p, paths))
            self.settings = replace(self.settings, opaque=(*others, *paths))
            self._because = f"runs {', '.join(map(repr, paths))} whole: {why}"
            self.plans.drop(lambda planned: not _run_whole(paths, planned))
            if self.first is not None and not _run_whole(paths, self.first):
                self.first = next(iter(self.plans), None)

    def prepare(self, calls: Sequence[Call]) -> None:
        """Plan for calls to come; a fraction as budget becomes bytes, by the largest of them.

        Raises:
            InfeasibleBudgetError, UnsupportedModuleError, rkgb.RkgbError: see `planned_for`.
        """
        share = self.settings.share and not self.settings.compile  # each compiles for itself
        with sharing(share) as ranks:
            given = _given_file(self.settings, is_follower(share))
            self._sources = sources_of(self.settings, given, ranks)
            # What is copied or pickled later goes elsewhere, where the file may not be.
            self.settings = replace(self.settings, plan=None)
            try:
                self._prepare(calls)
            finally:  # the first call sets it
                for setting in reversed(self._settings):
                    setting.undo()
        # Later calls come when they come, not on all ranks at once.
        self._sources = sources_of(self.settings, given)

    def _prepare(self, calls: Sequence[Call]) -> None:
        outside = unwatched() if changing_modes() else nullcontext()
        with planning, outside, torch.inference_mode(False), torch.enable_grad():
            calls = [_usable(self.model, call) for call in calls]
            _, fraction = parse_budget(self.settings.budget)
            if fraction is not None and len(calls) > 1:
                bare = without_hooks(self.model, type(self.model))
                with unseen():
                    peaks = [eager_peak_bytes(bare, *c, losses=self.losses) for c in calls]
                self.settings = replace(self.settings, budget=int(fraction * max(peaks)))
            for args, kwargs in calls:
                ordered = in_order(kwargs)
                autocast, flags = ambient()
                _, inputs = key_of(args, ordered)
                key = Key(self.watch.now(autocast).state, inputs, autocast, flags)
                if self.plans.get(key) is None:
                    self._plan(key, (args, ordered)).looks = _LOOKS

    def _plan(self, key: Key, call: Call) -> Family:
        """Plan for a key that no plan is for, within the same bytes."""
        with planning:
            family = self.plans.get(key)
            if family is not None:  # another thread has planned it
                return family
            if self._sets_what_a_first_call_sets():
                raise HandedOverOtherwiseError
            last = self.plans.last_key()
            why = self._because or ("the sample" if last is None else key.unlike(last))
            self._because = ""
            _log.debug("planning: %s", why)
            self._try_any_attribute(key, call)
            began = time.perf_counter()
            any_number = self._may_be_for_any_number(key)
            planned = self._without_readers(key, last, call, why)
            if planned is None:
                planned = self._planned(call, why, any_number=any_number)
            if any_number is not None:
                key, why = self._for_any_number(key, any_number, why, planned)
            row = _row(key, why, planned, time.perf_counter() - began)
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
            self.watch.read(planned.network.graph.dataflow.basic.sources)
            self.watch.ignore(planned.network.opaque, planned.assigned)
            key = replace(key, state=self._locate(planned))
            if self.plans.put(key, family):
                self.watch.forget(self.plans.states())
            return family

    def _without_readers(self, key: Key, last: Key | None, call: Call, why: str) -> Planned | None:
        """Plan with what reads a place whole, where that has another value at every step.

        None where there is no such place, or such a plan needs more bytes than there are.
        """
        alike = last is not None and replace(last, state=key.state) == key
        facts = self.changing.note(key.state, last.state if last is not None and alike else None)
        if not facts or self.settings.strict:
            return None
        before, paths = self.settings, readers(facts, self.watch.sources)
        opaque = ", ".join(f"'{path or '(root)'}'" for path in paths)
        others = (p for p in before.opaque if not _is_covered(p, paths))
        self.settings = replace(before, opaque=(*others, *paths))
        try:
            planned = self._planned(call, why)
        except (InfeasibleBudgetError, RkgbError) as error:
            _log.debug("%s cannot run whole: %s", opaque, error)
            self.settings = before
            self.changing.leave(facts)
            return None
        except HandedOverOtherwiseError:  # it is planned by blocks
            _log.warning(_CHANGES, why, opaque)
            raise
        _log.warning(_CHANGES, why, opaque)
        return planned

    def _locate(self, planned: Planned) -> ModuleState:
        """Return the state that a plan was made for, which knows where it reads kept tensors."""
        snapshot = self.watch.now(ambient()[0])
        snapshot.locate(planned.executor, planned.network.graph.dataflow.basic.constants)
        return snapshot.state

    def _try_any_attribute(self, key: Key, call: Call) -> None:
        """Plan for all numbers in the place of attributes that have changed, if they allow it.

        Raises:
            HandedOverOtherwiseError: calls hand these attributes over from now on.
        """
        names, whole = self.plans.attributes_unlike(key)
        can_be = self.plans_alone and not self.settings.compile
        tries = max((self._in_vain.get(name, 0) for name in names), default=_MOST_TRIES)
        if not can_be or tries >= _MOST_TRIES:
            return
        began, before = time.perf_counter(), self.watch.open
        self.watch.hand_over((*before, *names))
        why = "numbers among attributes that only enter arithmetic"
        try:
            call = call[0], {**call[1], **self.watch.numbers(key.autocast)}
            leaves, inputs = key_of(*call)
            added = range(len(leaves) - len(names), len(leaves))
            whole |= {place for place in added if type(leaves[place]) is int}
            planned = self._planned(call, why, any_number=whole)
        except HandedOverOtherwiseError:
            raise
        except RkgbError as error:  # which comes again without
            _log.debug("attributes are not handed over: %s", error)
            self._leave_attributes(names, before)
            return
        except BaseException:
            self.watch.hand_over(before)
            raise
        self.watch.read(planned.network.graph.dataflow.basic.sources)
        state = self._locate(planned)
        general = replace(key, state=state, inputs=inputs).for_any_number(whole)
        if planned.numbers is None or general is None:
            self._leave_attributes(names, before)
            return
        self.plans.look_for(whole)
        row = _row(general, why, planned, time.perf_counter() - began)
        if self.plans.put(general, self._family(general, planned, row)):
            self.watch.forget(self.plans.states())
        raise HandedOverOtherwiseError

    def _leave_attributes(self, names: Sequence[Place], before: tuple[Place, ...]) -> None:
        self._in_vain.update((name, self._in_vain.get(name, 0) + 1) for name in names)
        self.watch.hand_over(before)

    def _may_be_for_any_number(self, key: Key) -> frozenset[int] | None:
        """Return which ints a call has otherwise than one that differs in numbers only.

        None where there is none before it, or where a plan for any number was tried in vain.
        """
        can_be = self.plans_alone and not self.settings.compile
        whole = self.plans.ints_unlike(key) if can_be else None
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

    def _add_way(self, family: Family, call: Call) -> Planned:
        """Plan for values of the inputs that lead the forward another way."""
        with planning:
            why = "values of the inputs that the forward looks at"
            # After some ways, what looks at values is run whole rather than followed again.
            guards = len(family.variants) < _MOST_WAYS
            planned = self._planned(call, why, guards=guards)
            _log.info("planned for other %s: %s", why, "; ".join(planned.outcomes.texts[:3]))
            self.watch.read(planned.network.graph.dataflow.basic.sources)
            self._locate(planned)
            family.variants.insert(0, planned)
            family.looks += 1
            del family.variants[_MOST_WAYS:]
            return planned

    def for_call(self, call: Call) -> tuple[Terms, Memory | None]:
        """Return how to plan for a call: where memory was given, in what a whole step leaves."""
        whole = self.settings.whole_step
        if whole is None:
            return self.settings, None
        bare = without_hooks(self.model, type(self.model))
        found = whole.call_bytes(bare, *self.as_called(call))
        memory = whole.memory(self.model, found)
        self.call_bytes = self.call_bytes or found
        self.settings = replace(self.settings, whole_step=whole.settled(memory))
        budget = memory.budget_bytes if memory.holds() else _TOO_LITTLE
        return replace(self.settings, budget=budget, whole_step=None), memory

    def memory(self) -> Memory | None:
        """Return where each byte of a step goes now; None where no memory was given."""
        whole, found = self.settings.whole_step, self.call_bytes
        if whole is None or found is None:
            return None
        peak_bytes = None if self.first is None else self.first.plan.peak_bytes
        memory: Memory = whole.memory(self.model, found, peak_bytes)
        return memory

    def _planned(
        self,
        call: Call,
        why: str,
        *,
        guards: bool = True,
        any_number: frozenset[int] | None = None,
        settings: Terms | None = None,
    ) -> Planned:
        bare = without_hooks(self.model, type(self.model))
        self._tell_what_is_taken_off()
        if self.plans_alone and (parts := whole_parts(bare)):
            raise UnsupportedModuleError(
                f"parameters of '{parts[0]}' in {type(self.model).__name__} are spread over "
                "processes, which would have to run the collectives of a plan in one order. Plan "
                "its blocks: rockmate.apply_to_blocks(model, sample, budget)."
            )
        try:
            if not self._sources:
                self._sources = sources_of(self.settings, given_file(self.settings))
            with unseen():  # planned modules inside belong to this plan
                known = () if self.settings.compile else (*self.plans, *self.known)
                request = Request.of(
                    *(bare, call, settings or self.settings),
                    known=known,
                    blocks=self.blocks,
                    guards=guards,
                    any_number=any_number,
                    own=self.model,
                    losses=self.losses,
                )
                planned = planned_for(request, self._sources)
                if planned.how == "planned":  # others are made for the gradients that came last
                    planned.foresee(bare, request.sample.leaves)
        except TraceError as error:
            # An assert on values, an index out of range: the user's own error, as without us.
            if self.first is None or error.__cause__ is None:
                raise
            args, kwargs = self.as_called(call)
            # The plain forward raises it, after what it changes until then.
            self.model.forward(*args, **kwargs)
            raise  # plain PyTorch has none here
        except InfeasibleBudgetError as error:
            if self.first is None:
                raise
            other = InfeasibleBudgetError(
                f"for a call of another kind than before ({why}): {error}",
                asked_bytes=error.asked_bytes,
                minimum_bytes=error.minimum_bytes,
            )
            other.whole = error.whole
            raise other from None
        self._set_from_now_on(planned)
        if self.first is None:
            self.first = planned
            # Later plans get the same bytes, whatever a fraction of *their* eager peak would be.
            self.settings = replace(self.settings, budget=planned.budget_bytes)
        return planned

    def as_called(self, call: Call) -> Call:
        """Return a call without the attributes that are handed over beside its arguments."""
        own = self.watch.numbers(ambient()[0]) if self.watch.open else {}
        args, kwargs = call
        return args, {name: value for name, value in kwargs.items() if name not in own}

    def _set_from_now_on(self, planned: Planned) -> None:
        """Set what the plain forward sets at its first call, as which the plan was recorded."""
        known = {setting.key for setting in self._settings}
        for found in planned.network.graph.dataflow.basic.sources.settings:
            setting = found.on(self.model)
            if setting.key not in known:
                self._settings.append(setting)
        self._sets_what_a_first_call_sets()

    def _sets_what_a_first_call_sets(self) -> bool:
        """Set what the plain forward would set at this call; whether there was anything."""
        due = [setting for setting in self._settings if setting.is_due]
        for setting in due:
            setting.apply()
        return bool(due)

    def _tell_what_is_taken_off(self) -> None:
        """Say once what the plan does instead of what the model asks for."""
        name = type(self.model).__name__
        wanted = (getattr(m, "gradient_checkpointing", False) for m in self.model.modules())
        if "checkpoints" not in self._told and any(value is True for value in wanted):
            self._told.add("checkpoints")
            _log.info(
                "gradient checkpointing inside %s is taken off: the plan decides what is "
                "recomputed",
                name,
            )
        paths = compiled_modules(self.model)
        if "compiled" not in self._told and paths:
            self._told.add("compiled")
            inside = ", ".join(f"'{path or '(root)'}'" for path in paths[:_MOST_NAMED])
            more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
            _log.info("torch.compile of %s%s in %s is taken off: %s", inside, more, name, INSTEAD)

    def rows(self) -> PlanRows:
        """Return what was planned, why, and how long it took."""
        return self.plans.rows()

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


def _is_covered(path: str, paths: Collection[str]) -> bool:
    return any(is_inside(path, around) for around in paths)


def _run_whole(paths: Iterable[str], planned: Planned) -> bool:
    """Whether a plan runs all of these submodules whole."""
    return all(_is_covered(path, planned.network.opaque) for path in paths)


def _given_file(settings: Terms, follows: bool) -> GivenFile | None:
    """Return the file that settings name; it may lie on the machine of rank 0 only.

    Raises:
        PlanFileError: it cannot be read.
    """
    try:
        return given_file(settings)
    except PlanFileError:
        if not follows:
            raise
        return None


def _row(key: Key, why: str, planned: Planned, seconds: float) -> PlanRow:
    peak, budget = planned.plan.peak_bytes, planned.budget_bytes
    row = PlanRow(what(key), why, planned.how, seconds, peak, budget, planned.plan.overhead)
    _log.info("%s", row)
    return row


def _usable(model: nn.Module, call: Call) -> Call:
    """Return a call whose tensors autograd may save, whatever mode they were made in."""
    refuse_lazy_modules(model)
    for name, tensor in (*placed_parameters(model), *model.named_buffers()):
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
