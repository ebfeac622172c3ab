"""Where storages of a step may be moved, with a link whose rates have been measured.

A process measures the rates of a place once. Its plans share worker threads and blocks, which go
with the last of them. A plan from a file brings the rates with it that it was made for.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass, replace

import torch

from rkgb.copies import Copies, copies_for, measured_link
from rockmate.guards.sharded import world_size
from rockmate.problems.link import Link
from rockmate.problems.problem import Problem
from rockmate.settings import DISK, HOST


@dataclass(frozen=True, eq=False)
class Offload:
    """A place for storages, and the link to it."""

    where: str
    copies: Copies
    link: Link


_copies: weakref.WeakValueDictionary[tuple[str, torch.device], Copies]
_copies = weakref.WeakValueDictionary()
_measured: dict[tuple[str, torch.device], Link] = {}
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
        copies = _copies.get(key)
        if copies is None:
            folder = None if where == HOST else where.removeprefix(DISK)
            copies = _copies[key] = copies_for(device, folder)
        copies.is_limited |= host_bytes is not None
        if link is None:
            if key not in _measured:
                _measured[key] = Link(*measured_link(copies, device))
            link = _measured[key].shared_by(_processes_here())
    return Offload(where, copies, replace(link, host_bytes=host_bytes))


def _processes_here() -> int:
    """Return how many processes of a distributed job run on this machine, or else in all."""
    processes = world_size()
    return int(os.environ.get("LOCAL_WORLD_SIZE", processes)) if processes > 1 else 1


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
