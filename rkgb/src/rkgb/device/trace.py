"""The memory of a run: the peak and the end of each of its named spans."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

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
