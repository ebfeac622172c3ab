"""How fast storages move on this machine while kernels run: measured, because nothing says it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from rkgb.copies.moved import PAGE_BYTES, Arena, Copies, Pending

_LEAST_MS = 4.0  # of a copy by which a rate is told
_FIRST_BYTES, _MOST_BYTES = 1 << 20, 1 << 26
_REPETITIONS = 7
Clock = Callable[[], float]  # in seconds


class LinkRates(NamedTuple):
    """Bytes per millisecond each way, and what every copy takes besides.

    If both ways share one link, copies out and in at the same time take as long as one after the
    other.
    """

    out_bytes_per_ms: float
    in_bytes_per_ms: float
    latency_ms: float
    is_shared: bool


def measured_link(
    copies: Copies, where: torch.device, clock: Clock = time.perf_counter
) -> LinkRates:
    """Measure copies from a device and back, while it multiplies matrices."""
    with torch.no_grad():
        rates = _measured(_Measure(copies, where, clock))
    copies.let_go()
    return rates


def _measured(measure: _Measure) -> LinkRates:
    latency_ms = measure.median(lambda: measure.out_ms(PAGE_BYTES))
    size_bytes = _FIRST_BYTES
    while size_bytes < _MOST_BYTES and measure.least_ms(size_bytes) < latency_ms + _LEAST_MS:
        size_bytes *= 2
    out_ms = measure.median(lambda: measure.out_ms(size_bytes))
    back_ms = measure.median(lambda: measure.back_ms(size_bytes))
    both_ms = measure.median(lambda: measure.both_ms(size_bytes))
    return LinkRates(
        size_bytes / max(out_ms - latency_ms, out_ms / 2),
        size_bytes / max(back_ms - latency_ms, back_ms / 2),
        latency_ms,
        both_ms > (max(out_ms, back_ms) + out_ms + back_ms) / 2,
    )


class _Measure:
    def __init__(self, copies: Copies, where: torch.device, clock: Clock) -> None:
        self._copies, self._where, self._clock = copies, where, clock
        self._factor = torch.ones(_side(where), _side(where), device=where)
        self._product = torch.empty_like(self._factor)
        self._size_bytes = 0
        self._arena: Arena | None = None

    def _take(self, size_bytes: int) -> None:
        if size_bytes == self._size_bytes:
            return
        self._arena = None
        self._copies.let_go()  # a smaller one would only take memory
        self._arena = self._copies.arena(2 * size_bytes)
        made = [torch.zeros(size_bytes, dtype=torch.uint8, device=self._where) for _ in range(2)]
        self._storages = [tensor.untyped_storage() for tensor in made]
        self._size_bytes = size_bytes
        self._until_done(self._out(0), self._out(1))  # pages are there from now on

    def _out(self, place: int) -> Pending:
        return self._copies.start_out(self._storages[place], *self._there(place))

    def _back(self) -> Pending:
        return self._copies.start_back(self._storages[1], *self._there(1))

    def _there(self, place: int) -> tuple[Arena, int]:
        assert self._arena is not None
        return self._arena, place * self._size_bytes

    def out_ms(self, size_bytes: int) -> float:
        """Return the time of a copy from the device."""
        return self._timed(size_bytes, lambda: [self._out(0)])

    def least_ms(self, size_bytes: int) -> float:
        """Return the least time of a few copies: other programs may hold up one of them."""
        return min(self.out_ms(size_bytes) for _ in range(3))

    def back_ms(self, size_bytes: int) -> float:
        """Return the time of a copy to the device."""
        return self._timed(size_bytes, lambda: [self._back()])

    def both_ms(self, size_bytes: int) -> float:
        """Return the time of one each way at once."""
        return self._timed(size_bytes, lambda: [self._out(0), self._back()])

    def _timed(self, size_bytes: int, start: Callable[[], list[Pending]]) -> float:
        self._take(size_bytes)
        self._copies.wait_for_kernels()
        began = self._clock()
        self._until_done(*start())
        return (self._clock() - began) * 1e3

    def _until_done(self, *copies: Pending) -> None:
        while not all(copy.is_done() for copy in copies):
            torch.mm(self._factor, self._factor, out=self._product)
            self._copies.wait_for_kernels()
        for copy in copies:
            copy.join()

    def median(self, measured: Callable[[], float]) -> float:
        """Return the median of a few repetitions."""
        return sorted(measured() for _ in range(_REPETITIONS))[_REPETITIONS // 2]


def _side(where: torch.device) -> int:
    """Return the rows of a matrix whose product takes a moment."""
    return 2048 if where.type == "cuda" else 128
