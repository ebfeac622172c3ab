"""Measure memory as the allocator sees it: the peak and the end of named spans of a run.

CUDA has counters. The CPU allocator has none, but it reports every allocation to `torch.profiler`,
kernels' workspace included; that is the only cheap source that sees it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

Span = Callable[[str], AbstractContextManager[None]]
_PREFIX = "rkgb::"


@dataclass(frozen=True, slots=True)
class SpanMemory:
    """Bytes above the start of the run: when the span starts, at its highest, when it ends."""

    name: str
    start_bytes: int
    peak_bytes: int
    end_bytes: int

    @property
    def added_peak_bytes(self) -> int:
        return self.peak_bytes - self.start_bytes


@dataclass(frozen=True)
class MemoryTrace:
    """Memory of one run, in bytes above what was allocated when it started."""

    peak_bytes: int
    end_bytes: int
    spans: tuple[SpanMemory, ...]
    timeline: tuple[tuple[float, int], ...]  # (ms since the start, bytes); empty on CUDA


def trace_memory(run: Callable[[Span], object], device: torch.device) -> MemoryTrace:
    """Call `run(span)` and return its memory; `span(name)` is a context manager for parts of it.

    Spans must not overlap. The result of `run` is dropped after the measurement has ended.
    """
    gc.collect()
    return _trace_cuda(run, device) if device.type == "cuda" else _trace_cpu(run)


def _trace_cuda(run: Callable[[Span], object], device: torch.device) -> MemoryTrace:
    torch.cuda.synchronize(device)
    base = torch.cuda.memory_allocated(device)
    highest = 0
    spans: list[SpanMemory] = []

    def settle() -> int:
        # Peaks between spans count for the whole run although no span reports them.
        nonlocal highest
        peak = torch.cuda.max_memory_allocated(device) - base
        highest = max(highest, peak)
        torch.cuda.reset_peak_memory_stats(device)
        return peak

    @contextlib.contextmanager
    def span(name: str) -> Iterator[None]:
        settle()
        start = torch.cuda.memory_allocated(device) - base
        yield
        peak = settle()
        end = torch.cuda.memory_allocated(device) - base
        spans.append(SpanMemory(name, start, max(peak, start), end))

    torch.cuda.reset_peak_memory_stats(device)
    result = run(span)
    settle()
    end = torch.cuda.memory_allocated(device) - base
    del result
    return MemoryTrace(highest, end, tuple(spans), ())


def _trace_cpu(run: Callable[[Span], object]) -> MemoryTrace:
    from torch.profiler import ProfilerActivity, profile, record_function

    def span(name: str) -> AbstractContextManager[None]:
        return record_function(_PREFIX + name)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run(span)
    del result
    memory: list[tuple[int, int]] = []
    marks: list[tuple[int, int, str]] = []
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        name = event.name()
        if name == "[memory]":
            memory.append((event.start_ns(), event.nbytes()))
        elif name.startswith(_PREFIX):
            marks.append((event.start_ns(), event.end_ns(), name.removeprefix(_PREFIX)))
    memory.sort(key=lambda event: event[0])
    marks.sort()
    return _replay(memory, marks)


def _replay(memory: list[tuple[int, int]], marks: list[tuple[int, int, str]]) -> MemoryTrace:
    now = peak = place = 0
    origin = memory[0][0] if memory else 0
    timeline: list[tuple[float, int]] = []
    spans: list[SpanMemory] = []

    def advance(until: int | None) -> int:
        nonlocal now, peak, place
        highest = now
        while place < len(memory) and (until is None or memory[place][0] <= until):
            now += memory[place][1]
            timeline.append(((memory[place][0] - origin) / 1e6, now))
            highest = max(highest, now)
            place += 1
        peak = max(peak, highest)
        return highest

    for start, end, name in marks:
        advance(start)
        before = now
        spans.append(SpanMemory(name, before, advance(end), now))
    advance(None)
    return MemoryTrace(peak, now, tuple(spans), tuple(timeline))
