"""The processes that share a model, and what they must agree on while they plan it.

Every process records, measures and simulates its own part. They exchange plain facts between the
steps, and what follows from the facts of all is computed by each: so nobody waits for a planner,
all choose the same, and an error of one is raised by all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from rockmate.errors import PlanMismatchError, RockmateError

Facts = TypeVar("Facts")


class Team:
    """This process and the others of a model; alone unless its parameters lie in pieces."""

    def __init__(self, groups: Sequence[Any] = ()) -> None:
        self.groups = tuple(groups)

    @classmethod
    def of(cls, model: nn.Module, process_group: Any = None) -> Team:
        """Return the processes over which parameters of a model are spread, or those of a group."""
        if process_group is not None:
            return cls([process_group])
        meshes = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
        groups: dict[int, Any] = {}
        for mesh in meshes:
            if mesh is not None:
                groups.update({id(group): group for group in mesh.get_all_groups()})
        return cls(list(groups.values()))

    @property
    def is_first(self) -> bool:
        """Whether what this process has comes first in `gather`."""
        import torch.distributed as dist

        return all(dist.get_rank(group) == 0 for group in self.groups)

    def gather(self, facts: Facts) -> list[Facts]:
        """Return the facts of all processes, in one order everywhere."""
        found = [facts]
        for group in self.groups:
            import torch.distributed as dist

            rows: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(rows, found, group=group)
            found = [item for row in rows for item in row]
        return found

    def raise_together(self, error: Exception | None) -> None:
        """Raise the error of this process, or else the first one of any other.

        Raises:
            PlanMismatchError: some process cannot follow a saved plan; the same on all.
            RockmateError: another process has failed; the text is its error's.
        """
        mismatches = self.gather(error if isinstance(error, PlanMismatchError) else None)
        first = next((found for found in mismatches if found is not None), None)
        if first is not None:
            raise first
        texts = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for place, text in enumerate(texts):
            if text is not None:
                raise RockmateError(f"process {place} of those that plan this model failed: {text}")
