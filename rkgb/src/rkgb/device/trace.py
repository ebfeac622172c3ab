"""What a run took of the memory: the peak and the end of each of its named spans."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

Span = Callable[[str], AbstractContextManager[None]]
# (moment, bytes): a request is positive, its end negative.
Change = tuple[int, int]
Mark = tuple[int, int, str]  # (start, end, name)


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
    """Memory of one run, in bytes above what was in use when it started.

    All but one figure are sums of what was asked for, and the same at every run. What the
    allocator hands out for it depends on the blocks that it finds, so on what ran before.
    """

    peak_bytes: int
    end_bytes: int
    spans: tuple[SpanMemory, ...]
    timeline: tuple[tuple[float, int], ...]  # (ms since the start, bytes); empty on CUDA
    allocated_peak_bytes: int  # in whole blocks of the allocator


def replay(changes: list[Change], marks: list[Mark]) -> MemoryTrace:
    """Return the memory of a run from all its requests; both lists are in order."""
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
