"""CUDA: counters of the allocator, events, generators.

ROCm, which torch also calls 'cuda', is refused in chosen.py. Its half-precision products use
another method inside a backward, so recomputed values would have other bits.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rkgb.device.base import CallTime, Device, MemoryTrace, Span, SpanMemory
from rkgb.device.queues import CopyQueues
from rkgb.errors import UnsupportedDeviceError
from rkgb.torch_api.private.memory import allocator_settings, current_cuda_stream, keep_cuda_busy

# The allocator hands out multiples of this (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize).
BLOCK_BYTES = 512
# How long the device is kept busy before a timed call: longer than the host needs to launch it.
_HEAD_START_CYCLES = 400_000
_WAKE_CYCLES = 200_000_000  # about a tenth of a second, enough for the clocks to rise


class Cuda(Device):
    """One CUDA device; `where` always has its index."""

    is_asynchronous = True
    random_state_bytes = 0  # it is kept on the host

    def __init__(self, where: torch.device) -> None:
        index = torch.cuda.current_device() if where.index is None else where.index
        super().__init__(torch.device("cuda", index))

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.where)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
            "allocator": f"{torch.cuda.get_allocator_backend()} {allocator_settings()}".strip(),
            "cuBLAS workspaces": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "as usual"),
        }

    @property
    def why_uncounted(self) -> str | None:
        backend = torch.cuda.get_allocator_backend()
        if backend == "native":
            return None
        return f"the allocator in use, '{backend}', does not count what it hands out"

    def block_bytes(self, size_bytes: int) -> int:
        return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES

    # ------------------------------------------------------------------ memory

    def trace_memory(self, run: Callable[[Span], object]) -> MemoryTrace:
        why = self.why_uncounted
        if why is not None:
            raise UnsupportedDeviceError(
                f"memory on {self.where} cannot be measured: {why}. Use torch's own allocator: "
                "leave backend: out of PYTORCH_CUDA_ALLOC_CONF."
            )
        torch.cuda.synchronize(self.where)
        return trace_by_counters(run, self._counts, self._reset_peaks)

    def _counts(self) -> tuple[int, int, int, int]:
        stats = torch.cuda.memory_stats_as_nested_dict(self.where)
        asked, handed = stats["requested_bytes"]["all"], stats["allocated_bytes"]["all"]
        return asked["current"], asked["peak"], handed["current"], handed["peak"]

    def _reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.where)

    def free_bytes(self) -> int | None:
        free, _ = torch.cuda.mem_get_info(self.where)
        reserved = torch.cuda.memory_reserved(self.where)
        return int(free + reserved - torch.cuda.memory_allocated(self.where))

    def warm_up(self) -> None:
        with torch.cuda.device(self.where):
            warm_up_threads(self.where)
            keep_cuda_busy(_WAKE_CYCLES)
            torch.cuda.synchronize(self.where)

    def give_back(self) -> None:
        gc.collect()
        with torch.cuda.device(self.where):
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------ time

    def time(self, call: Callable[[], object]) -> CallTime:
        # On an idle device the events would also enclose the launch of the kernels.
        with torch.cuda.device(self.where):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            keep_cuda_busy(_HEAD_START_CYCLES)
            start.record()
            began = time.perf_counter()
            call()
            host_ms = (time.perf_counter() - began) * 1e3
            end.record()
            end.synchronize()
        return CallTime(float(start.elapsed_time(end)), host_ms)

    def current_stream(self) -> int:
        return current_cuda_stream(self.where.index)

    def copy_queues(self) -> CopyQueues:
        return CopyQueues(self.where)

    # ------------------------------------------------------------------ random numbers

    def random_state(self) -> Tensor | None:
        with _explaining_graph_capture():
            return torch.cuda.get_rng_state(self.where)

    def copied_generator(self) -> torch.Generator | None:
        with _explaining_graph_capture():
            return torch.cuda.default_generators[self.where.index].clone_state()

    def set_random_state(self, state: Tensor) -> None:
        with _explaining_graph_capture():
            torch.cuda.set_rng_state(state, self.where)


@contextlib.contextmanager
def _explaining_graph_capture() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not torch.cuda.is_current_stream_capturing():
            raise
        raise UnsupportedDeviceError(
            "a step that draws random numbers and recomputes them was captured as a CUDA graph, "
            "and torch cannot put the random state back within one. Capture a module without "
            "dropout, or run the step as it is."
        ) from error


def trace_by_counters(
    run: Callable[[Span], object],
    counts: Callable[[], tuple[int, int, int, int]],
    reset_peaks: Callable[[], None],
) -> MemoryTrace:
    """Return the memory of a run from the counters of an allocator.

    `counts` returns bytes: (requested now, requested peak, allocated now, allocated peak).
    """
    reset_peaks()
    base, _, handed_base, _ = counts()
    highest = handed_highest = 0
    spans: list[SpanMemory] = []

    def settle() -> tuple[int, int]:
        # A peak between two spans counts for the whole run although no span reports it.
        nonlocal highest, handed_highest
        now, peak, _, handed_peak = counts()
        highest = max(highest, peak - base)
        handed_highest = max(handed_highest, handed_peak - handed_base)
        reset_peaks()
        return now - base, peak - base

    def close_gap() -> int:
        now, peak = settle()
        if spans:
            spans[-1] = replace(spans[-1], next_peak_bytes=max(peak, spans[-1].end_bytes))
        return now

    @contextlib.contextmanager
    def span(name: str) -> Iterator[None]:
        start = close_gap()
        yield
        end, peak = settle()
        spans.append(SpanMemory(name, start, max(peak, start), end, end))

    result: Any = run(span)
    end = close_gap()
    del result
    return MemoryTrace(highest, end, tuple(spans), (), handed_highest)


def use_libraries(where: torch.device) -> None:
    """Multiply matrices as layers do, so that cuBLAS and cuBLASLt allocate their workspaces."""
    with torch.no_grad():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            matrix = torch.ones(64, 64, device=where, dtype=dtype)
            torch.addmm(matrix[0], matrix, matrix)
            torch.bmm(matrix[None], matrix[None])


def warm_up_threads(where: torch.device) -> None:
    """Use the libraries in this thread and in the one that runs backwards."""
    use_libraries(where)
    with torch.enable_grad():
        made = torch.ones((), device=where, requires_grad=True).clone()
        made.register_hook(lambda _gradient: use_libraries(where))
        made.backward()
