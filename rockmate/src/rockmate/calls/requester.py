"""Requests for plans of one module, with the settings that all its plans share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from rkgb import TraceError
from rkgb.elements import is_inside_any
from rkgb.safeguards import signals_wait
from rockmate.arguments import Call
from rockmate.calls.first_call import FirstCall
from rockmate.calls.plan_store import PlanStore
from rockmate.errors import (
    InfeasibleBudgetError,
    OtherForwardError,
    RockmateError,
    UnsupportedModuleError,
)
from rockmate.files.plan_file import PlanFile
from rockmate.guards.input_signature import ambient
from rockmate.guards.module_watch import ModuleWatch, without_hooks
from rockmate.guards.sharded import whole_parts
from rockmate.networks import Planned
from rockmate.options.options import KnownBlocks
from rockmate.requests.ranks import is_follower, sharing
from rockmate.requests.request import Request, Source
from rockmate.requests.saved_plan import plan_file_of
from rockmate.requests.sources import given_file, planned_for, sources_of
from rockmate.runtime.plain import unseen
from rockmate.settings import Terms
from rockmate.whole_step.memory import Memory
from rockmate.whole_step.outputs import CallBytes

_TOO_LITTLE = 1  # a budget whose refusal names the smallest one
_one_at_a_time = threading.RLock()  # a recording watches all of torch


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """While active, no other thread plans, and signals wait until what is changed is put back."""
    with _one_at_a_time, signals_wait():
        yield


class Requester:
    """Asks for plans for the calls of `model`, the plain module, within one budget."""

    losses = False  # only scalars are assumed to get gradients, if there are any
    is_part = False  # of a model that trains, also while this part is in eval mode
    plans_alone = True  # not together with processes that hold other parts of parameters

    def __init__(self, model: nn.Module, settings: Terms) -> None:
        self.model, self.settings = model, settings
        self.plans = PlanStore(settings.max_plans)
        self.blocks = KnownBlocks()
        self.watch = ModuleWatch(model)
        self.known: tuple[Planned, ...] = ()  # of similar modules, whose steps serve here too
        self.first: Planned | None = None
        self._sources: tuple[Source, ...] = ()  # of plans; none before the first
        self.call_bytes: CallBytes | None = None  # of the sample, if memory was given
        self._first_call = FirstCall(model)
        self._because = ""  # the reason for the next plan

    def prepare(self, calls: Sequence[Call]) -> None:
        """Plan for future calls; a fraction as budget becomes bytes, by the largest of them.

        Raises:
            InfeasibleBudgetError, UnsupportedModuleError, rkgb.RkgbError: see `planned_for`.
        """
        share = self.settings.share and not self.settings.compile  # pieces are not shared
        with sharing(share) as ranks:
            given = given_file(self.settings, follows=is_follower(share))
            self._sources = sources_of(self.settings, given, ranks)
            whole = self.settings.whole_step
            if given is not None and whole is not None and whole.awaits_loss:
                whole = replace(whole, seen=given.file.loss)
            # A copy or pickle may go to a machine without the file.
            self.settings = replace(self.settings, plan=None, whole_step=whole)
            try:
                self._prepare(calls)
            finally:  # the first call sets it
                self._first_call.undo()
        # Later calls do not come on all ranks at once.
        self._sources = sources_of(self.settings, given)

    def _prepare(self, calls: Sequence[Call]) -> None:
        raise NotImplementedError

    def for_call(self, call: Call) -> tuple[Terms, Memory | None]:
        """Return the settings for a call; if memory was given, the budget is what a step leaves."""
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
        """Return where each byte of a step goes now, or None if no memory was given."""
        whole, found = self.settings.whole_step, self.call_bytes
        if whole is None or found is None:
            return None
        peak_bytes = None if self.first is None else self.first.plan.peak_bytes
        memory: Memory = whole.memory(self.model, found, peak_bytes)
        uses = self.first is not None and self.first.network.coming is not None
        return memory.using_room_to_come() if uses else memory

    def _planned(
        self,
        call: Call,
        why: str,
        *,
        guards: bool = True,
        any_number: frozenset[int] | None = None,
        settings: Terms | None = None,
        is_again: bool = False,
    ) -> Planned:
        bare = without_hooks(self.model, type(self.model))
        self._first_call.tell_what_is_taken_off()
        if self.plans_alone and (parts := whole_parts(bare)):
            raise UnsupportedModuleError(
                f"parameters of '{parts[0]}' in {type(self.model).__name__} are spread over "
                "processes, which would have to run the collectives of a plan in one order. Plan "
                "its blocks: rockmate.apply_to_blocks(model, sample, budget)."
            )
        try:
            if not self._sources:
                self._sources = sources_of(self.settings, given_file(self.settings))
            with unseen():  # planned modules inside become part of this plan
                known = () if self.settings.compile else self._known(settings or self.settings)
                request = Request.of(
                    *(bare, call, settings or self.settings),
                    known=known,
                    blocks=self.blocks,
                    guards=guards,
                    any_number=any_number,
                    own=self.model,
                    losses=self.losses,
                    is_part=self.is_part,
                )
                planned = planned_for(request, self._sources)
                if planned.how == "planned":  # other plans are for the gradients that came last
                    planned.foresee(bare, request.sample.leaves)
        except OtherForwardError as error:  # Python decides by what no guard covers
            # What only the first forward computes is kept by now, and a recording finds it.
            if is_again:
                path = called_path(self.model, error.module_path)
                self.run_whole([path], error.difference)
                settings = None if settings is None else with_whole(settings, [path])
            return Requester._planned(
                self, call, why, guards=guards, any_number=any_number, settings=settings,
                is_again=not is_again,
            )  # fmt: skip
        except TraceError as error:
            # The user's own error, such as an assert on values or an index out of range.
            if self.first is None or error.__cause__ is None:
                raise
            args, kwargs = self.as_called(call)
            # The plain forward raises it, after its own changes.
            self.model.forward(*args, **kwargs)
            raise  # the plain forward raises none
        except InfeasibleBudgetError as error:
            if self.first is None:
                raise
            text = f"for a call of another kind than before ({why}): {error}"
            raise error.reworded(text) from None
        self._first_call.note(planned.network.basic.sources.settings)
        if self.first is None:
            self.first = planned
            # Later plans get the same bytes, not a fraction of their own eager peaks.
            self.settings = replace(self.settings, budget=planned.budget_bytes)
        return planned

    def _known(self, settings: Terms) -> tuple[Planned, ...]:
        """Return the plans with the same `coming` gradients as in these settings."""
        found = (*self.plans, *self.known)
        both = (one for planned in found for one in (planned, planned.accumulating) if one)
        return tuple(one for one in both if one.network.coming == settings.coming)

    def as_called(self, call: Call) -> Call:
        """Return a call without attributes that are handed over as arguments."""
        own = self.watch.numbers(ambient()[0]) if self.watch.open else {}
        args, kwargs = call
        return args, {name: value for name, value in kwargs.items() if name not in own}

    def run_whole(self, paths: Iterable[str], why: str) -> None:
        """Run these submodules whole from now on, and drop other plans.

        `why` says what a recording of them cannot contain.

        Raises:
            UnsupportedModuleError: no part may be run whole (`strict=True`).
        """
        paths = tuple(dict.fromkeys(paths))
        with planning():
            if self.settings.strict:
                named = ", ".join(f"'{path or '(root)'}'" for path in paths)
                raise UnsupportedModuleError(
                    f"{named} of {type(self.model).__name__} cannot be recorded: {why}. "
                    "strict=True lets no part run whole; without it these would."
                )
            self.settings = with_whole(self.settings, paths)
            self._because = f"runs {', '.join(map(repr, paths))} whole: {why}"
            self.plans.drop(lambda planned: not _run_whole(paths, planned))
            if self.first is not None and not _run_whole(paths, self.first):
                self.first = next(iter(self.plans), None)

    def plan_file(self) -> PlanFile:
        """Return a file of all plans, the one for the sample first."""
        first = self.planned
        others = [planned for planned in self.plans if planned is not first]
        whole = [planned.accumulating or planned for planned in (first, *others)]
        step = self.settings.whole_step
        return plan_file_of(whole, self.model, None if step is None else step.seen)

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


def with_whole(settings: Terms, paths: Collection[str]) -> Terms:
    """Return settings that also run these submodules whole."""
    others = (path for path in settings.opaque if not is_inside_any(path, paths))
    return replace(settings, opaque=(*others, *paths))


def _run_whole(paths: Iterable[str], planned: Planned) -> bool:
    """Return whether a plan runs all of these submodules whole."""
    return all(is_inside_any(path, planned.network.opaque) for path in paths)


def called_path(model: nn.Module, path: str) -> str:
    """Return the path of a module, or of the nearest one around it that is called (no list)."""
    while path and type(model.get_submodule(path)).forward is nn.Module.forward:
        path = path.rpartition(".")[0]
    return path
