"""The CPU: no counters, no blocks, everything at once."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from rkgb.device.base import CallTime, Device
from rkgb.device.profiled import trace_by_profiler
from rkgb.device.trace import MemoryTrace, Span


class Cpu(Device):
    """The CPU of this machine."""

    @property
    def name(self) -> str:
        return str(self.where)

    @property
    def is_asynchronous(self) -> bool:
        return False

    def block_bytes(self, size_bytes: int) -> int:
        return size_bytes

    def trace_memory(self, run: Callable[[Span], object]) -> MemoryTrace:
        return trace_by_profiler(run)

    def time(self, call: Callable[[], object]) -> CallTime:
        began = time.perf_counter()
        call()
        took_ms = (time.perf_counter() - began) * 1e3
        return CallTime(took_ms, took_ms)

    def random_state(self) -> Tensor | None:
        return None

    def set_random_state(self, state: Tensor) -> None:
        raise AssertionError("the CPU's generator is torch's default one")

    @property
    def random_state_bytes(self) -> int:
        return torch.get_rng_state().numel()
