"""Plans for new calls of a module, all within the same bytes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rkgb import RkgbError
from rkgb.engine import Sample
from rkgb.safeguards import refuse_lazy_modules
from rkgb.torch_api import changing_modes, placed_parameters, unwatched
from rockmate.arguments import Call
from rockmate.calls.plan_store import AnyNumber, Family, Key, PlanRow, PlanRows
from rockmate.calls.requester import Requester, planning, with_whole
from rockmate.errors import InfeasibleBudgetError, UnsupportedModuleError
from rockmate.guards.changing_places import ChangingPlaces, readers
from rockmate.guards.input_signature import ambient, in_order, key_of, told
from rockmate.guards.module_state import Place, WatchedState
from rockmate.guards.module_watch import without_hooks
from rockmate.networks import Planned, with_least_peak
from rockmate.requests.anew import eager_peak_bytes
from rockmate.runtime.plain import unseen
from rockmate.settings import Terms, parse_budget

_log = logging.getLogger("rockmate")
_MOST_WAYS = 6  # with plans, through one forward that reads values of its inputs
_MANY = 8  # recordings in a row for changing numbers
_LOOKS = 2  # at calls that were planned ahead
_CHANGES = (
    "what Python reads has another value at every step: %s. What reads it runs whole from now on, "
    "so that nothing is recorded for it: %s. Pass it as an argument, or keep it as an attribute of "
    "the module"
)


class HandedOverOtherwiseError(Exception):
    """Calls hand over other attributes from now on, so this one has another key."""


class NotPlannedError(Exception):
    """A new call, after the last plan was made; the text says what is new."""


class PlansOfModule(Requester):
    """Plans for the calls of `model`, the plain module, by their assumptions."""

    is_sealed = False  # no more plans are made

    def __init__(self, model: nn.Module, settings: Terms) -> None:
        super().__init__(model, settings)
        self.table = vars(model)
        self.changing = ChangingPlaces()
        self._in_a_row = 0  # recordings in a row that differed only in numbers
        self._any_number = AnyNumber(self.plans)

    def take_plans_of(
        self, other: PlansOfModule, chosen: Callable[[Planned], Planned] | None = None
    ) -> None:
        """Take the plans of the same module, or of a copy, that are for its present state.

        `chosen` returns what runs here instead of a plan of the other.
        """
        self._sources, self.known = other._sources, other.known
        self.watch.hand_over(other.watch.open)
        self.watch.read(other.watch.sources)
        autocast, _ = ambient()
        ours, theirs = self.watch.now(autocast).state, other.watch.now(autocast).state
        if tuple(ours.facts.items()) == tuple(theirs.facts.items()):
            for key, family in other.plans.families.items():
                if key.state is theirs:
                    taken = family if chosen is None else family.made_of(chosen)
                    self.plans.put(replace(key, state=ours), taken)
            ours.kept.update(theirs.kept)
            self.first = other.first
        if chosen is not None:
            for planned in self.plans:
                self._locate(planned)
            self.first = next(iter(self.plans), None)

    def _prepare(self, calls: Sequence[Call]) -> None:
        outside = unwatched() if changing_modes() else nullcontext()
        with planning(), outside, torch.inference_mode(False), torch.enable_grad():
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
                _, inputs = key_of(args, ordered, self.watch.asked)
                key = Key(self.watch.now(autocast).state, inputs, autocast, flags)
                if self.plans.get(key) is None:
                    self._plan(key, (args, ordered)).looks = _LOOKS

    def for_gradients(self, planned: Planned) -> Planned:
        """Return the plan with room for gradients, where there are some before the step."""
        other = planned.accumulating
        if other is None or all(p.grad is None for p in self.model.parameters()):
            return planned
        return other

    def least(self, planned: Planned) -> Planned:
        """Return the plan of least peak for a recording."""
        found = with_least_peak(planned.accumulating or planned)
        self._locate(found)
        return found

    def plan_because(self, why: str, key: Key, call: Call) -> Family:
        """Plan for a key again; `why` is told."""
        self._because = why
        return self._plan(key, call)

    def _plan(self, key: Key, call: Call) -> Family:
        """Plan for a new key, within the same bytes."""
        with planning():
            family = self.plans.get(key)
            if family is not None:  # another thread has planned it
                return family
            last = self.plans.last_key()
            if self.is_sealed:
                raise NotPlannedError("no plan" if last is None else key.unlike(last))
            if due := self._first_call.sets():
                state = self.watch.now(key.autocast).state
                if self.plans.get(replace(key, state=state)) is not None:
                    raise HandedOverOtherwiseError
                self._first_call.take_back(due)
            why = self._because or ("the sample" if last is None else key.unlike(last))
            self._because = ""
            _log.debug("planning: %s", why)
            can_be = self.plans_alone and not self.settings.fixes_numbers
            if can_be:
                self._try_any_attribute(key, call)
            began = time.perf_counter()
            any_number = self._any_number.ints(key) if can_be else None
            planned = self._without_readers(key, last, call, why)
            if planned is None:
                planned = self._planned(call, why, any_number=any_number)
            self.watch.read(planned.network.basic.sources)
            key = replace(key, inputs=key_of(*call, self.watch.asked)[1])
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
            whole = planned.network.opaque
            self.watch.ignore(whole, planned.assigned, from_now_on=self.settings.opaque)
            key = replace(key, state=self._locate(planned))
            if self.plans.put(key, family):
                self.watch.forget(self.plans.states())
            return family

    def _without_readers(self, key: Key, last: Key | None, call: Call, why: str) -> Planned | None:
        """Plan with submodules whole that read values which change at every step.

        None means that there are none, or that such a plan does not fit.
        """
        alike = last is not None and replace(last, state=key.state) == key
        facts = self.changing.note(key.state, last.state if last is not None and alike else None)
        if not facts or self.settings.strict:
            return None
        before, paths = self.settings, readers(facts, self.watch.sources)
        opaque = ", ".join(f"'{path or '(root)'}'" for path in paths)
        self.settings = with_whole(before, paths)
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

    def _locate(self, planned: Planned) -> WatchedState:
        """Return the state that a plan was made for, with the places of tensors that it keeps."""
        snapshot = self.watch.now(ambient()[0])
        for one in (planned, planned.accumulating):
            if one is not None:
                snapshot.locate(one.executor, one.network.basic.constants)
        return snapshot.state

    def _try_any_attribute(self, key: Key, call: Call) -> None:
        """Plan for any numbers in the attributes that have changed, if they only enter arithmetic.

        Raises:
            HandedOverOtherwiseError: calls hand these attributes over from now on.
        """
        names, whole = self._any_number.attributes(key)
        if not names:
            return
        began, before = time.perf_counter(), self.watch.open
        self.watch.hand_over((*before, *names))
        why = "numbers among attributes that only enter arithmetic"
        try:
            call = call[0], {**call[1], **self.watch.numbers(key.autocast)}
            leaves, _ = key_of(*call)
            added = range(len(leaves) - len(names), len(leaves))
            whole |= {place for place in added if type(leaves[place]) is int}
            planned = self._planned(call, why, any_number=whole)
        except HandedOverOtherwiseError:
            raise
        except RkgbError as error:  # the usual plan raises it again
            _log.debug("attributes are not handed over: %s", error)
            self._leave_attributes(names, before)
            return
        except BaseException:
            self.watch.hand_over(before)
            raise
        self.watch.read(planned.network.basic.sources)
        state, inputs = self._locate(planned), key_of(*call, self.watch.asked)[1]
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
        self._any_number.not_attributes(names)
        self.watch.hand_over(before)

    def _for_any_number(
        self, key: Key, whole: frozenset[int], why: str, planned: Planned
    ) -> tuple[Key, str]:
        """Return the key of a plan and its reason; if it is for any number, the general key."""
        general = key.for_any_number(whole)
        assert general is not None
        if planned.numbers is not None:
            self.plans.look_for(whole)
            return general, "numbers that only enter arithmetic"
        self._any_number.not_ints(general)
        return key, why

    def _family(self, key: Key, planned: Planned, row: PlanRow) -> Family:
        """Return a family with a plan first, and then the known ones of its key."""
        known = self.plans.get(key)
        others = [] if known is None else known.variants
        return Family([planned, *others][:_MOST_WAYS], row)

    def _add_way(self, family: Family, call: Call) -> Planned:
        """Plan for values of the inputs that lead the forward another way."""
        with planning():
            why = "values of the inputs that the forward looks at"
            if self.is_sealed:
                raise NotPlannedError(why)
            # After some ways, code that reads values runs whole instead.
            guards = len(family.variants) < _MOST_WAYS
            planned = self._planned(call, why, guards=guards)
            _log.info("planned for other %s: %s", why, "; ".join(planned.outcomes.texts[:3]))
            self.watch.read(planned.network.basic.sources)
            self._locate(planned)
            family.variants.insert(0, planned)
            family.looks += 1
            del family.variants[_MOST_WAYS:]
            return planned

    def rows(self) -> PlanRows:
        """Return the report of all plans."""
        return self.plans.rows()


def _row(key: Key, why: str, planned: Planned, seconds: float) -> PlanRow:
    peak, budget = planned.plan.peak_bytes, planned.budget_bytes
    row = PlanRow(told(key.inputs), why, planned.how, seconds, peak, budget, planned.plan.overhead)
    _log.info("%s", row)
    return row


def _usable(model: nn.Module, call: Call) -> Call:
    """Return a call whose tensors autograd can save: those of inference mode are copied."""
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
