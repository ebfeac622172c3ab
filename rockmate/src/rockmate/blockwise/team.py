"""The processes that share a model, and what they must agree on while they plan it.

Every process records, measures and simulates its own part. They exchange plain facts between the
steps, and what follows from the facts of all is computed by each: so nobody waits for a planner,
all choose the same, and an error of one is raised by all.

A process that fails in the middle of a step can meet the others no more, who wait in a collective.
It leaves a word in the store of the process group. Their collective ends with the process, or with
the time-out of the group, and then they find that word, and raise the same.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from torch import nn

from rkgb.torch_api import group_store
from rockmate.errors import PlanMismatchError, RockmateError

Facts = TypeVar("Facts")


class Team:
    """This process and the others of a model; alone unless its parameters lie in pieces."""

    _numbers: ClassVar[Counter[int]] = Counter()  # of teams of the same processes

    def __init__(self, groups: Sequence[Any] = ()) -> None:
        self.groups = tuple(groups)
        self.place = 0  # of this process in `gather`
        self._failed = ""  # the key of the first failure in a step
        if self.groups:
            import torch.distributed as dist

            for group in reversed(self.groups):
                self.place = self.place * dist.get_world_size(group) + dist.get_rank(group)
            who = zlib.crc32(repr(sorted(self.gather(dist.get_rank()))).encode())
            self._numbers[who] += 1
            self._failed = f"rockmate/blocks/{who}/{self._numbers[who]}/failed"

    @classmethod
    def of(cls, model: nn.Module, process_group: Any = None) -> Team:
        """Return the processes over which parameters of a model are spread, or those of a group."""
        if process_group is not None:
            return cls([process_group])
        meshes = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
        groups: dict[str, Any] = {}
        for mesh in meshes:
            if mesh is not None:
                groups.update({group.group_name: group for group in mesh.get_all_groups()})
        return cls(list(groups.values()))

    @property
    def is_first(self) -> bool:
        """Whether what this process has comes first in `gather`."""
        return self.place == 0

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self.gather(None))

    def gather(self, facts: Facts) -> list[Facts]:
        """Return the facts of all processes, in one order everywhere."""
        found = [facts]
        for group in self.groups:
            import torch.distributed as dist

            rows: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(rows, found, group=group)
            found = [item for row in rows for item in row]
        return found

    def anyone(self, is_so: bool) -> bool:
        """Whether something is so here or in any other process: the same answer in all."""
        return any(self.gather(is_so))

    def raise_together(self, error: Exception | None) -> None:
        """Raise what has failed here or in any other process, the same in all.

        Raises:
            PlanMismatchError: some process cannot follow a saved plan.
            RockmateError: a process has failed; the text is its error's. Where all have failed
                alike, each raises its own error.
        """
        mismatch = error if isinstance(error, PlanMismatchError) else None
        rows = self.gather((mismatch, None if error is None else _told(error)))
        texts = [text for _, text in rows]
        first = next((found for found, _ in rows if found is not None), None)
        if first is not None:
            raise first
        if error is not None and len(set(texts)) == 1:
            raise error
        for place, text in enumerate(texts):
            if text is not None:
                raise _failure(place, text) from error

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Let all raise what fails inside, where no process may wait for another."""
        error = None
        try:
            yield
        except Exception as found:
            error = found
        self.raise_together(error)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Let all raise what fails inside, where processes wait for each other.

        Those that wait learn it when their collective gives up.
        """
        try:
            yield
        except Exception as error:
            if not self.groups:
                raise
            try:
                store = group_store()
                mine = f"{self.place} {_told(error)}"
                words = store.compare_set(self._failed, "", mine).decode()  # the first failure
            except RuntimeError:  # the store has gone with its process
                raise error from None
            place, text = words.split(" ", 1)
            raise _failure(int(place), text) from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _failure(place: int, text: str) -> RockmateError:
    return RockmateError(f"process {place} of those that plan this model failed: {text}")
