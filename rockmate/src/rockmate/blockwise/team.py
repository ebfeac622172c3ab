"""The processes that share a model, and their agreement while they plan it.

Every process records, measures and simulates its own part. Between steps they exchange plain facts,
and each computes the consequences of all facts. So no process waits for a planner, all make the
same choice, and an error in one is raised by all.

A process that fails in the middle of a step cannot reach others that wait in a collective of the
model. Their collective ends with the process, or with the time-out of the group. They then find the
failure among the messages, and raise the same error.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from torch import nn

from rockmate.errors import PlanMismatchError
from rockmate.requests.exchange import Exchange, Facts, exchange_of, told


class Team:
    """This process and the others of a model; just this one unless parameters are sharded."""

    _numbers: ClassVar[Counter[int]] = Counter()  # of teams of the same processes

    def __init__(self, groups: Sequence[Any] = ()) -> None:
        self.groups = tuple(groups)
        self.place = 0  # of this process in `gather`
        self._exchange: Exchange | None = None
        if self.groups:
            import torch.distributed as dist

            members = _members(self.groups)
            who = zlib.crc32(repr(members).encode())
            self._numbers[who] += 1
            self.place = members.index(dist.get_rank())
            prefix = f"rockmate/blocks/{who}/{self._numbers[who]}/"
            self._exchange = exchange_of(self.place, len(members), prefix)

    @classmethod
    def of(cls, model: nn.Module, process_group: Any = None) -> Team:
        """Return the processes over which a model's parameters are sharded, or those of a group."""
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
        """Whether this process's facts come first in `gather`."""
        return self.place == 0

    @property
    def size(self) -> int:
        """The number of processes."""
        return self._exchange.size if self._exchange else 1

    def gather(self, facts: Facts) -> list[Facts]:
        """Return the facts of all processes, in the same order on all of them."""
        return self._exchange.gather(facts) if self._exchange else [facts]

    def anyone(self, is_so: bool) -> bool:
        """Return whether `is_so` holds in any process; all get the same answer."""
        return any(self.gather(is_so))

    def raise_together(self, error: Exception | None) -> None:
        """Raise an error of this or any other process, the same on all.

        Raises:
            PlanMismatchError: a process cannot follow a saved plan.
            PlanSharingError: a process has failed; the text is that of its error. If all have
                failed in the same way, each raises its own error.
        """
        mismatch = error if isinstance(error, PlanMismatchError) else None
        rows = self.gather((mismatch, None if error is None else told(error)))
        texts = [text for _, text in rows]
        first = next((found for found, _ in rows if found is not None), None)
        if first is not None:
            raise first
        if error is not None and len(set(texts)) == 1:
            raise error
        for place, text in enumerate(texts):
            if text is not None and self._exchange is not None:
                raise self._exchange.failure_of(place, text) from error

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raise errors inside on all processes, if no process waits for another inside."""
        error = None
        try:
            yield
        except Exception as found:
            error = found
        self.raise_together(error)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Raise errors inside on all processes, if processes wait for each other inside.

        Waiting processes raise when their collective gives up.
        """
        try:
            yield
        except Exception as error:
            if self._exchange is None:
                raise
            try:
                common = self._exchange.fail(error)
            except RuntimeError:  # the store ended with its process
                raise error from None
            raise common from error


def _members(groups: Sequence[Any]) -> list[int]:
    """Return the ranks of the processes that the groups join, directly or through each other."""
    import torch.distributed as dist

    found = [dist.get_rank()]
    for group in groups:
        rows: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(rows, found, group=group)
        found = sorted({rank for row in rows for rank in row})
    return found
