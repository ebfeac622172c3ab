"""What a device must be able to tell."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from rkgb.device.trace import MemoryTrace, Span


@dataclass(frozen=True, slots=True)
class CallTime:
    """What one call took: the device for its kernels, and the host to start them."""

    device_ms: float
    host_ms: float
    waited_ms: float = 0.0  # for a core that another program had, as far as that is known


class Device(ABC):
    """What the road from a module to a plan asks a device for."""

    def __init__(self, where: torch.device) -> None:
        self.where = where

    @property
    @abstractmethod
    def name(self) -> str:
        """The device in words, for recordings of costs."""

    @property
    def environment(self) -> dict[str, str]:
        """Libraries and settings by which kernels and blocks are chosen here, by name."""
        return {}

    @property
    def why_uncounted(self) -> str | None:
        """Why the allocator's counters cannot be trusted, or None if they can."""
        return None

    @abstractmethod
    def block_bytes(self, size_bytes: int) -> int:
        """Return what the allocator hands out at least for one request."""

    @abstractmethod
    def trace_memory(self, run: Callable[[Span], object]) -> MemoryTrace:
        """Call `run(span)` and return its memory; the result is dropped afterwards."""

    @abstractmethod
    def time(self, call: Callable[[], object]) -> CallTime:
        """Return what a call takes of the device and of the host."""

    def counting_own_time(self) -> AbstractContextManager[None]:
        """Let `time` tell, inside, what a call takes by itself where other programs compute."""
        return nullcontext()

    @property
    @abstractmethod
    def is_asynchronous(self) -> bool:
        """Whether the host goes on while kernels run."""

    @abstractmethod
    def random_state(self) -> Tensor | None:
        """Return the state of the device's own generator; None where it has none."""

    def copied_generator(self) -> torch.Generator | None:
        """Return a copy of the device's own generator; None where it has none."""
        return None

    @abstractmethod
    def set_random_state(self, state: Tensor) -> None:
        """Put the state of the device's own generator back."""

    @property
    @abstractmethod
    def random_state_bytes(self) -> int:
        """Bytes of the device's memory that a kept random state takes."""

    def free_bytes(self) -> int | None:
        """Return how much more could be allocated now; None where that is not known."""
        return None

    def warm_up(self) -> None:
        """Let libraries take what they keep, in all threads that will compute."""
        return

    def give_back(self) -> None:
        """Give what nobody uses any more back to the system: of cycles, what is young.

        A search of all objects takes 0.2 s in a program with a few libraries.
        """
        gc.collect(1)
