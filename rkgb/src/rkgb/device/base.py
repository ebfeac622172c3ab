"""The interface of a device, and the memory of a run: peak and end of each of its named spans."""

from __future__ import annotations

import gc
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rkgb.device.queues import CopyQueues


@dataclass(frozen=True, slots=True)
class CallTime:
    """The time of one call: of its kernels on the device, and of the host that launches them."""

    device_ms: float
    host_ms: float
    waited_ms: float = 0.0  # for a core that another program used, as far as known


class Device(ABC):
    """Memory, time and random numbers of one device."""

    is_asynchronous: bool  # the host continues while kernels run
    random_state_bytes: int  # of device memory that a saved random state takes

    def __init__(self, where: torch.device) -> None:
        self.where = where

    @property
    @abstractmethod
    def name(self) -> str:
        """The device's name for files of recorded costs."""

    @property
    def environment(self) -> dict[str, str]:
        """Libraries and settings by which kernels and blocks are chosen here, by name."""
        return {}

    @property
    def why_uncounted(self) -> str | None:
        """Why the allocator's counters are wrong, or None if they are right."""
        return None

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory that is counted here."""
        return tensor.device.type == self.where.type

    @abstractmethod
    def block_bytes(self, size_bytes: int) -> int:
        """Return the bytes that the allocator hands out at least for one request."""

    @abstractmethod
    def trace_memory(self, run: Callable[[Span], object]) -> MemoryTrace:
        """Call `run(span)` and return its memory. Its result is dropped."""

    @abstractmethod
    def time(self, call: Callable[[], object]) -> CallTime:
        """Return the time of a call on the device and on the host."""

    def counting_own_time(self) -> AbstractContextManager[None]:
        """Inside, `time` leaves out what other programs on the machine add to a call."""
        return nullcontext()

    def current_stream(self) -> int:
        """Return a number of the queue that kernels of this thread go to now."""
        return 0

    def copy_queues(self) -> CopyQueues | None:
        """Return queues for copies beside the computation, or None where the host computes."""
        return None

    @abstractmethod
    def random_state(self) -> Tensor | None:
        """Return the state of the device's own generator, or None if it has none."""

    def copied_generator(self) -> torch.Generator | None:
        """Return a copy of the device's own generator, or None if it has none."""
        return None

    @abstractmethod
    def set_random_state(self, state: Tensor) -> None:
        """Restore the state of the device's own generator."""

    def free_bytes(self) -> int | None:
        """Return how many bytes could be allocated at present, or None if that is not known."""
        return None

    def warm_up(self) -> None:
        """Let libraries allocate their lasting workspaces, in all threads that will compute."""
        return

    def give_back(self) -> None:
        """Return unused memory to the system, after collecting the young garbage.

        A full collection takes 0.2 s in a program with a few libraries.
        """
        gc.collect(1)


_lock = threading.Lock()
_active = [0, False]  # number of captures, and whether collection was on before the first


@contextmanager
def no_collection() -> Iterator[None]:
    """While active, Python's garbage collection is off.

    A capture makes a hundred objects per operation, drops few, and has none in cycles. Each
    collection visits all objects, so collections would take a third of a long capture. Objects made
    meanwhile stay young, so `Device.give_back` still finds cycles among them.
    """
    with _lock:
        if not _active[0]:
            _active[1] = gc.isenabled()
        _active[0] += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _active[0] -= 1
            if _active[1] and not _active[0]:
                gc.enable()


Span = Callable[[str], AbstractContextManager[None]]
# (moment, bytes): positive for an allocation, negative for its release.
Change = tuple[int, int]
Mark = tuple[int, int, str]  # (start, end, name)


@dataclass(frozen=True, slots=True)
class SpanMemory:
    """Bytes above the start of the run: at the span's start, its peak and its end.

    `next_peak_bytes` is the peak between its end and the next span (or the end of the run).
    """

    name: str
    start_bytes: int
    peak_bytes: int
    end_bytes: int
    next_peak_bytes: int

    @property
    def added_peak_bytes(self) -> int:
        return self.peak_bytes - self.start_bytes


@dataclass(frozen=True)
class MemoryTrace:
    """Memory of one run, in bytes above what was in use when it started.

    All figures but one are sums of requests and equal at every run. `allocated_peak_bytes` depends
    on the blocks that the allocator finds, so on what ran before.
    """

    peak_bytes: int
    end_bytes: int
    spans: tuple[SpanMemory, ...]
    timeline: tuple[tuple[float, int], ...]  # (ms since the start, bytes); empty on CUDA
    allocated_peak_bytes: int  # in whole blocks of the allocator
    is_metered: bool = True  # else all figures are zero

    @property
    def released_bytes(self) -> int:
        """What the run has freed of what was in use before; another run has no room there."""
        return max(0, -self.end_bytes)

    @property
    def lasting_peak_bytes(self) -> int:
        """The peak of another run, for which nothing of earlier ones is left to be freed."""
        return self.peak_bytes + self.released_bytes


def replay(changes: list[Change], marks: list[Mark]) -> MemoryTrace:
    """Return the memory of a run from all its allocations; both lists are in order."""
    now = peak = place = 0
    origin = changes[0][0] if changes else 0
    timeline: list[tuple[float, int]] = []
    spans: list[SpanMemory] = []

    def advance(until: int | None) -> int:
        nonlocal now, peak, place
        highest = now
        while place < len(changes) and (until is None or changes[place][0] <= until):
            now += changes[place][1]
            timeline.append(((changes[place][0] - origin) / 1e6, now))
            highest = max(highest, now)
            place += 1
        peak = max(peak, highest)
        return highest

    for start, end, name in marks:
        gap = advance(start)
        if spans:
            spans[-1] = replace(spans[-1], next_peak_bytes=gap)
        before = now
        highest = advance(end)
        spans.append(SpanMemory(name, before, highest, now, now))
    gap = advance(None)
    if spans:
        spans[-1] = replace(spans[-1], next_peak_bytes=gap)
    return MemoryTrace(peak, now, tuple(spans), tuple(timeline), peak)
