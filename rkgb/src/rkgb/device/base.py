"""The interface of a device."""

from __future__ import annotations

import gc
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from rkgb.device.queues import CopyQueues
from rkgb.device.trace import MemoryTrace, Span


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
