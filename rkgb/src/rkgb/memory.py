"""Measure memory as the allocator sees it: the peak and the end of named spans of a run.

CUDA has counters. The CPU allocator has none, but it reports every allocation to `torch.profiler`,
kernels' workspace included; that is the only cheap source that sees it.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

Span = Callable[[str], AbstractContextManager[None]]
_PREFIX = "rkgb::"

# The profiler's library otherwise prints a line at every start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@dataclass(frozen=True, slots=True)
class SpanMemory:
    """Bytes above the start of the run: when the span starts, at its highest, when it ends.

    `next_peak_bytes` is the highest after its end and before the next span (or the end of the run).
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
    """Memory of one run, in bytes above what was allocated when it started."""

    peak_bytes: int
    end_bytes: int
    spans: tuple[SpanMemory, ...]
    timeline: tuple[tuple[float, int], ...]  # (ms since the start, bytes); empty on CUDA


def trace_memory(run: Callable[[Span], object], device: torch.device) -> MemoryTrace:
    """Call `run(span)` and return its memory; `span(name)` is a context manager for parts of it.

    Spans must not overlap. The result of `run` is dropped after the measurement has ended.
    """
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

    def close_gap() -> None:
        peak = settle()
        if spans:
            spans[-1] = replace(spans[-1], next_peak_bytes=max(peak, spans[-1].end_bytes))

    @contextlib.contextmanager
    def span(name: str) -> Iterator[None]:
        close_gap()
        start = torch.cuda.memory_allocated(device) - base
        yield
        peak = settle()
        end = torch.cuda.memory_allocated(device) - base
        spans.append(SpanMemory(name, start, max(peak, start), end, end))

    torch.cuda.reset_peak_memory_stats(device)
    result = run(span)
    close_gap()
    end = torch.cuda.memory_allocated(device) - base
    del result
    return MemoryTrace(highest, end, tuple(spans), ())


def _trace_cpu(run: Callable[[Span], object]) -> MemoryTrace:
    from torch.profiler import ProfilerActivity, profile, record_function

    def span(name: str) -> AbstractContextManager[None]:
        return record_function(_PREFIX + name)

    with warnings.catch_warnings():
        # Some releases of torch say once that a second cycle would forget the first: we run one.
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        profiler.start()
    try:
        result = run(span)
    finally:
        profiler.stop()
    del result
    memory: list[tuple[int, int]] = []
    marks: list[tuple[int, int, str]] = []
    profiled: Any = profiler.profiler
    for event in profiled.kineto_results.events():
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
        gap = advance(start)
        if spans:
            spans[-1] = replace(spans[-1], next_peak_bytes=gap)
        before = now
        highest = advance(end)
        spans.append(SpanMemory(name, before, highest, now, now))
    gap = advance(None)
    if spans:
        spans[-1] = replace(spans[-1], next_peak_bytes=gap)
    return MemoryTrace(peak, now, tuple(spans), tuple(timeline))
