"""Where storages of a step may be moved, with a link whose rates have been measured.

A place is made once per process: its worker threads, blocks and rates serve every plan.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import torch

from rkgb.copies import Copies, copies_for, measured_link
from rockmate.problems.link import Link
from rockmate.problems.problem import Problem

_HOST = "host"
_DISK = "disk:"


@dataclass(frozen=True, eq=False)
class Offload:
    """A place for storages, and the link to it."""

    where: str
    copies: Copies
    link: Link


_made: dict[tuple[str, torch.device], Offload] = {}
_making = threading.Lock()


def offload_of(where: str | None, device: torch.device, host_bytes: int | None) -> Offload | None:
    """Return the place that a user names, for storages of a device; None for no offload.

    Its rates are measured when it is first asked for, while kernels run.
    """
    if where is None:
        return None
    key = where, device
    with _making:
        if key not in _made:
            folder = where.removeprefix(_DISK) if where != _HOST else None
            copies = copies_for(device, folder)
            _made[key] = Offload(where, copies, Link(*measured_link(copies, device)))
        found = _made[key]
    return replace(found, link=replace(found.link, host_bytes=host_bytes))


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
