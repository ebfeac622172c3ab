"""What a device has, and what it holds beside the tensors of a step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from rkgb.engine import device_of

_MOST_OF_CONTEXT_BYTES = 1 << 30  # what is held beyond that, other processes hold
_FRAGMENTS = 50  # one part of so many lies between blocks of CUDA's allocator


def there_is_bytes(device: torch.device, held_bytes: int) -> int:
    """Return what the tensors of this process may take, if `held_bytes` of them are there."""
    free_bytes = device_of(device).free_bytes()
    if device.type == "cuda":
        return (free_bytes or 0) + torch.cuda.memory_allocated(device)
    return held_bytes + (min(_free_on_host()) if free_bytes is None else free_bytes)


def context_bytes(device: torch.device) -> int:
    """Return what CUDA's context takes of a device, beside the allocator."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    context = total - free - torch.cuda.memory_reserved(device)
    return int(min(context, _MOST_OF_CONTEXT_BYTES))


def other_tensors_bytes(device: torch.device, known_bytes: int) -> int:
    """Return what is allocated beside what is known: workspaces, other models, averages."""
    if device.type != "cuda":
        return 0
    device_of(device).warm_up()
    return max(0, torch.cuda.memory_allocated(device) - known_bytes)


def fragments_bytes(device: torch.device, whole_bytes: int) -> int:
    """Return what may be reserved without being in a tensor."""
    return -(-whole_bytes // _FRAGMENTS) if device.type == "cuda" else 0


def _free_on_host() -> Iterator[int]:
    """Yield what the machine has left, and the group of processes that this one is in."""
    yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        yield 1024 * int(next(line.split()[1] for line in lines if "MemAvailable" in line))
    with suppress(OSError, ValueError):  # "max" is no number
        group = Path("/sys/fs/cgroup")
        most = int((group / "memory.max").read_text("ascii"))
        yield max(0, most - int((group / "memory.current").read_text("ascii")))
