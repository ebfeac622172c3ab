"""Where a plan may already lie when a step has been recorded: a file that was given, or the cache.

`find` returns a saved plan or None; what was planned is put back by `keep`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

from torch import nn

from rkgb.engine import Sample
from rkgb.run import RunnableGraph
from rockmate.errors import PlanFileError
from rockmate.files.cache_folder import CacheFolder
from rockmate.files.plan_file import PlanFile, SavedPlan
from rockmate.networks.planned import Planned
from rockmate.pipeline.identity import cache_key, recording_digest
from rockmate.pipeline.saved_plan import differences, mismatch, plan_file_of, refuse_elsewhere
from rockmate.settings import Terms

_log = logging.getLogger("rockmate")


@dataclass(frozen=True)
class Asked:
    """A recorded step for which a plan is wanted."""

    model: nn.Module
    recorded: RunnableGraph
    sample: Sample
    settings: Terms

    @cached_property
    def digest(self) -> str:
        """What the recording is known by."""
        return recording_digest(self.recorded)


class Shelf(Protocol):
    """Has plans, and takes them."""

    @property
    def is_asked_first(self) -> bool:
        """Whether it is asked before a plan follows from other sizes, which takes no longer."""

    def find(self, asked: Asked) -> SavedPlan | None:
        """Return the plan for a recorded step; None where it has to be planned.

        Raises:
            PlanMismatchError: there should be one, and it is for something else.
        """

    def keep(self, asked: Asked, planned: Planned) -> None:
        """Take what was planned."""


class NoShelf:
    """Has nothing, takes nothing."""

    is_asked_first: ClassVar[bool] = False

    def find(self, asked: Asked) -> SavedPlan | None:
        return None

    def keep(self, asked: Asked, planned: Planned) -> None:
        return


class GivenFile:
    """A file that the user names: it must have the plan of the first call."""

    is_asked_first: ClassVar[bool] = True

    def __init__(self, file: PlanFile, beyond: Shelf) -> None:
        self.file, self.beyond = file, beyond
        self._is_first = True

    def find(self, asked: Asked) -> SavedPlan | None:
        first, self._is_first = self._is_first, False
        if first:
            refuse_elsewhere(self.file, asked.model, asked.sample)
        digest = asked.digest
        for saved in self.file.plans:
            if saved.recording == digest:
                return saved
        if first:
            saved = self.file.plans[0]
            found = differences(saved, asked.model, asked.recorded, asked.sample)
            raise mismatch(type(asked.model).__name__, found)
        return self.beyond.find(asked)

    def keep(self, asked: Asked, planned: Planned) -> None:
        self.beyond.keep(asked, planned)


@dataclass(frozen=True)
class Cache:
    """The folder of plans between two starts."""

    folder: CacheFolder
    is_asked_first: ClassVar[bool] = False

    def find(self, asked: Asked) -> SavedPlan | None:
        found = self.folder.get(self._key(asked))
        if found is None or found.plans[0].recording != asked.digest:
            return None
        _log.info("a plan from %s serves", self.folder.path)
        return found.plans[0]

    def keep(self, asked: Asked, planned: Planned) -> None:
        if planned.how != "planned":
            return
        try:
            self.folder.put(self._key(asked), plan_file_of([planned], asked.model))
        except PlanFileError as error:  # pragma: no cover - a plan of ours holds
            _log.warning("the plan is not kept: %s", error)

    def _key(self, asked: Asked) -> str:
        return cache_key(asked.digest, asked.model, asked.sample.device, asked.settings)


def shelf_of(settings: Terms) -> Shelf:
    """Return the shelf that settings name.

    Raises:
        PlanFileError: the file that was given cannot be read, or is none.
    """
    folder = CacheFolder.chosen(settings.cache)
    beyond: Shelf = NoShelf() if folder is None else Cache(folder)
    if settings.plan is None:
        return beyond
    return GivenFile(PlanFile.load(settings.plan), beyond)
