"""The CPU: no allocator counters, no blocks, and synchronous calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rkgb.device.base import CallTime, Device
from rkgb.device.profiled import trace_by_profiler
from rkgb.device.trace import MemoryTrace, Span


class Cpu(Device):
    """The CPU of this machine."""

    is_asynchronous = _counts_own_time = False
    # Read once: reading it allocates counted memory.
    random_state_bytes = torch.get_rng_state().numel()

    @property
    def name(self) -> str:
        return str(self.where)

    def block_bytes(self, size_bytes: int) -> int:
        return size_bytes

    def trace_memory(self, run: Callable[[Span], object]) -> MemoryTrace:
        return trace_by_profiler(run)

    def time(self, call: Callable[[], object]) -> CallTime:
        began, own_began = time.perf_counter(), time.thread_time()
        call()
        took_ms = (time.perf_counter() - began) * 1e3
        own_ms = (time.thread_time() - own_began) * 1e3
        if self._counts_own_time:
            return CallTime(own_ms, own_ms)
        return CallTime(took_ms, took_ms, max(0.0, took_ms - own_ms))

    @contextlib.contextmanager
    def counting_own_time(self) -> Iterator[None]:
        # With several threads, the timed one would spin while it waits for those without a core.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._counts_own_time = True
        try:
            yield
        finally:
            self._counts_own_time = False
            torch.set_num_threads(threads)

    def random_state(self) -> Tensor | None:
        return None

    def set_random_state(self, state: Tensor) -> None:
        raise AssertionError("the CPU's generator is torch's default one")
