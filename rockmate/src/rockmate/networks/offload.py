"""Where storages of a step may be moved, with a link whose rates have been measured.

A place is made once per process: its worker threads, blocks and rates serve every plan. A plan from
a file brings the rates with it that it was made for.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace

import torch

from rkgb.copies import Copies, copies_for, measured_link
from rockmate.problems.link import Link
from rockmate.problems.problem import Problem
from rockmate.settings import DISK, HOST


@dataclass(frozen=True, eq=False)
class Offload:
    """A place for storages, and the link to it."""

    where: str
    copies: Copies
    link: Link


_copies: dict[tuple[str, torch.device], Copies] = {}
_made: dict[tuple[str, torch.device], Offload] = {}
_making = threading.Lock()


def offload_of(
    where: str | None, device: torch.device, host_bytes: int | None, link: Link | None = None
) -> Offload | None:
    """Return the place that a user names, for storages of a device; None for no offload.

    Its rates are those of a link that is known, or measured when they are first asked for, while
    kernels run. What is measured is shared with the other processes of a job on this machine.
    """
    if where is None:
        return None
    key = where, device
    with _making:
        if key not in _copies:
            folder = None if where == HOST else where.removeprefix(DISK)
            _copies[key] = copies_for(device, folder)
        found = _made.get(key)
        if found is None and link is None:
            rates = Link(*measured_link(_copies[key], device))
            found = _made[key] = Offload(where, _copies[key], rates)
        if found is None:
            assert link is not None
            found = Offload(where, _copies[key], link)
    here = link or found.link.shared_by(_processes_here())
    return replace(found, link=replace(here, host_bytes=host_bytes))


def _processes_here() -> int:
    """Return how many processes of a distributed job run on this machine, or else in all."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", distributed.get_world_size()))


def with_link(problem: Problem, movable: frozenset[str], link: Link) -> Problem:
    """Return the problem in which these storages, by their names, may be moved over a link.

    What is smaller than a copy's latency is worth stays.
    """
    least_bytes = link.latency_ms * min(link.out_bytes_per_ms, link.in_bytes_per_ms)
    storages = tuple(
        replace(storage, is_movable=True)
        if storage.name in movable
        and not (storage.is_phantom or storage.is_output)
        and storage.bwd_users
        and storage.size_bytes > least_bytes
        else storage
        for storage in problem.storages
    )
    return replace(problem, storages=storages, link=link)
