"""What differs between devices. No other place of this package asks which device it is on.

    device = device_of(tensor.device)
    device.block_bytes(1000)            # 1024 on CUDA, 1000 on a CPU
    device.time(call)                   # milliseconds of the device
    device.random_state()               # of the device's own generator, or None

`standing_in` lets another object answer for a device: tests use a CPU with the rules of CUDA.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# The share of the free memory that is offered. The rest is left for fragmentation, which no
# schedule controls.
USABLE_SHARE_OF_FREE = 0.9
BLOCK_BYTES = 512  # c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize


@dataclass(frozen=True, slots=True)
class Counts:
    """Bytes that an allocator has handed out: at present, and at most since the last reset."""

    now_bytes: int
    peak_bytes: int


class Device(ABC):
    """Memory, time and random numbers of one device."""

    has_counters: bool  # of its allocator; otherwise the profiler reports every request
    warms_up: bool  # libraries allocate workspaces or search for algorithms at a first run

    def __init__(self, where: torch.device) -> None:
        self.where = where

    def counts(self) -> Counts:
        """Synchronise and return the allocator's counters."""
        raise NotImplementedError

    def reset_peak(self) -> None:
        """Reset the peak of the counters to the present bytes."""
        raise NotImplementedError

    def block_bytes(self, size_bytes: int) -> int:
        """Return the bytes that the allocator hands out for one request."""
        return size_bytes

    @abstractmethod
    def time(self, call: Callable[[], object]) -> float:
        """Return the milliseconds from a call's start to the end of all work that it started."""

    def random_state(self) -> torch.Tensor | None:
        """Return the state of the device's own generator; None where it has none."""
        return None

    def set_random_state(self, state: torch.Tensor) -> None:
        """Put the state of the device's own generator back."""
        raise NotImplementedError

    @property
    @abstractmethod
    def random_state_bytes(self) -> int:
        """Bytes of device memory that one saved random state takes."""

    def usable_bytes(self, coming_bytes: int) -> int | None:
        """Return the bytes that a step may use, after `coming_bytes`; None if not known."""
        return None


class Cpu(Device):
    """The CPU of this machine."""

    has_counters = warms_up = False

    def time(self, call: Callable[[], object]) -> float:
        # A single thread does all the work itself. Time without a core belongs to other processes.
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        begin = clock()
        call()
        return 1000 * (clock() - begin)

    @property
    def random_state_bytes(self) -> int:
        return torch.get_rng_state().nbytes


class Cuda(Device):
    """One CUDA device."""

    has_counters = warms_up = True

    def block_bytes(self, size_bytes: int) -> int:
        return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES

    def counts(self) -> Counts:
        torch.cuda.synchronize(self.where)
        now, peak = (read(self.where) for read in _COUNTERS)
        return Counts(now, peak)

    def reset_peak(self) -> None:
        torch.cuda.synchronize(self.where)
        torch.cuda.reset_peak_memory_stats(self.where)

    def time(self, call: Callable[[], object]) -> float:
        with torch.cuda.device(self.where):
            begin: Any = torch.cuda.Event(enable_timing=True)
            end: Any = torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end))

    def random_state(self) -> torch.Tensor | None:
        return torch.cuda.get_rng_state(self.where)

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self.where)

    @property
    def random_state_bytes(self) -> int:
        return 0  # it is kept on the host

    def usable_bytes(self, coming_bytes: int) -> int | None:
        free, _ = torch.cuda.mem_get_info(self.where)
        cached = torch.cuda.memory_reserved(self.where) - torch.cuda.memory_allocated(self.where)
        return int(USABLE_SHARE_OF_FREE * (free + cached - coming_bytes))


_COUNTERS = (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated)
_standing_in: list[Device] = []


def is_known(where: torch.device) -> bool:
    """Return whether memory on a device can be counted and its random numbers repeated.

    ROCm, which torch also calls 'cuda', is excluded: its half-precision products inside a backward
    use another method, so recomputed values would have other bits.
    """
    if any(device.where.type == where.type for device in _standing_in):
        return True
    return where.type == "cpu" or (where.type == "cuda" and torch.version.hip is None)


def device_of(where: torch.device) -> Device:
    """Return the object that answers for a device."""
    for device in reversed(_standing_in):
        if device.where.type == where.type:
            return device
    return Cuda(where) if where.type == "cuda" else Cpu(where)


@contextlib.contextmanager
def standing_in(device: Device) -> Iterator[Device]:
    """While active, `device` answers for all devices of its type."""
    _standing_in.append(device)
    try:
        yield device
    finally:
        _standing_in.remove(device)
