"""The sources of plans, in the order in which they are asked.

expected_gradients  derived from known plans, for the unusual gradients that arrived last
other_numbers       the steps of a known plan whose program differs only in numbers
AmongRanks          another rank's plan; plans from the sources below are shared
GivenFile           a file that the user names
other_sizes         derived from known plans for other sizes
Cache               the folder of plans between two starts
anew                a new plan
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rockmate.comparison.deterministic import deterministic_algorithms
from rockmate.errors import InfeasibleBudgetError, PlanFileError, PlanMismatchError
from rockmate.files.cache_folder import CacheFolder
from rockmate.files.plan_file import PlanFile
from rockmate.networks.planned import Planned
from rockmate.requests.anew import anew
from rockmate.requests.exchange import Exchange
from rockmate.requests.ranks import AmongRanks
from rockmate.requests.request import Request, Source, first_of
from rockmate.requests.resized import (
    expected_gradients,
    other_numbers,
    other_sizes,
    ready_for_others,
)
from rockmate.requests.saved_plan import not_for, plan_file_of, planned_from, refuse_elsewhere
from rockmate.settings import Terms

_log = logging.getLogger("rockmate")


class GivenFile:
    """A file that the user names; it must have a plan for the first call."""

    def __init__(self, file: PlanFile) -> None:
        self.file, self._is_first = file, True

    def __call__(self, request: Request) -> Planned | None:
        first, self._is_first = self._is_first, False
        if first:
            refuse_elsewhere(self.file, request)
        for saved in self.file.plans:
            if saved.recording == request.digest:
                return planned_from(saved, request)
        if first:
            raise not_for(self.file.plans[0], request)
        return None


@dataclass(frozen=True)
class Cache:
    """The folder of plans between two starts; it stores plans from the source `beyond`."""

    folder: CacheFolder
    beyond: Source

    def __call__(self, request: Request) -> Planned | None:
        found = self.folder.get(request.key)
        if found is not None and found.plans[0].recording == request.digest:
            try:
                kept = planned_from(found.plans[0], request)
            except PlanMismatchError as error:  # a digest does not cover all that sizes follow from
                _log.info("the plan in %s is not used: %s", self.folder.path, error)
            else:
                _log.info("a plan from %s serves", self.folder.path)
                return kept
        planned = self.beyond(request)
        if planned is not None:
            try:
                self.folder.put(request.key, plan_file_of([planned], request.model))
            except PlanFileError as error:  # pragma: no cover - our plans are valid
                _log.warning("the plan is not kept: %s", error)
        return planned


def given_file(settings: Terms, *, follows: bool = False) -> GivenFile | None:
    """Return the file that settings name, if they name one.

    The file may exist only on the machine of rank 0; a rank that `follows` does not read it.

    Raises:
        PlanFileError: it cannot be read, or is no such file.
    """
    if settings.plan is None:
        return None
    try:
        return GivenFile(PlanFile.load(settings.plan))
    except PlanFileError:
        if not follows:
            raise
        return None


def sources_of(
    settings: Terms, given: GivenFile | None, ranks: Exchange | None = None
) -> tuple[Source, ...]:
    """Return the sources that settings allow, with a given file, and ranks if there are any.

    A file has plans for usual gradients. Ranks exchange plans at every call, or at none.
    """
    if settings.compile:  # a file knows no compiled code
        return (anew,)
    folder = CacheFolder.chosen(settings.cache)
    made: Source = anew if folder is None else Cache(folder, anew)
    # At other sizes, other storages should move.
    sources: tuple[Source, ...] = (made,) if settings.stands_alone else (other_sizes, made)
    if given is not None:
        sources = (given, *sources)
    if ranks is not None:
        sources = (AmongRanks(ranks, sources),)
    sources = (other_numbers, *sources)
    return sources if given or ranks or settings.stands_alone else (expected_gradients, *sources)


def planned_for(request: Request, sources: Sequence[Source] = (anew,)) -> Planned:
    """Return the plan of the first source that has one.

    The module, its buffers and gradients, and the random state are restored.

    Raises:
        InfeasibleBudgetError: no plan fits; it names the smallest budget that does, and opaque
            calls.
        rkgb.TraceError, rkgb.UnsupportedOpError: the module cannot be recorded exactly.
        UnsupportedModuleError: the module or its state cannot be run exactly.
        PlanMismatchError: the given file is for another call, device or version.
        SelfTestError: the planned module disagreed with eager PyTorch.
    """
    if request.settings.self_test == "deterministic":
        request = replace(request, settings=replace(request.settings, self_test=True))
        _compare_deterministically(request)
    planned = first_of(sources, request)
    assert planned is not None  # the last source plans anew
    return ready_for_others(planned, request)


def _compare_deterministically(request: Request) -> None:
    """Plan and test once with deterministic kernels, so that bits must agree.

    Raises:
        SelfTestError: the bits differ.
    """
    settings = replace(request.settings, progress=False)
    call = request.sample.args, request.sample.kwargs

    def plan(settings: Terms) -> None:
        planned_for(
            Request.of(
                *(request.model, call, settings), guards=request.guards, losses=request.losses
            )
        )

    with deterministic_algorithms():
        try:
            plan(settings)
        except InfeasibleBudgetError as error:  # these kernels may need more
            plan(replace(settings, budget=error.minimum_bytes))
