"""What is measured of a link is what it has: by a clock that the link itself moves on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from rkgb.copies import Arena, Copies, Host, measured_link
from rkgb.copies.moved import Block

_TICK_S = 2e-5  # of the device, for a product of matrices


@dataclass
class Room:
    size_bytes: int
    is_broken: bool = False


@dataclass
class Timed:
    link: Link
    end_s: float

    def join(self) -> None:
        self.link.now_s = max(self.link.now_s, self.end_s)

    def is_done(self) -> bool:
        return self.link.now_s >= self.end_s

    def abandon(self) -> None:
        return


class Link(Copies):
    """Copies nothing, in the time of a link."""

    def __init__(self, out: float, back: float, latency_ms: float, *, is_shared: bool) -> None:
        super().__init__()
        self.rates = {"out": out, "back": back}
        self.latency_ms, self.is_shared, self.now_s = latency_ms, is_shared, 0.0
        self.free_s = {"out": 0.0, "back": 0.0}
        self.products = 0

    def new_block(self, size_bytes: int) -> Block:
        return Room(size_bytes)

    def wait_for_kernels(self) -> None:
        self.now_s += _TICK_S
        self.products += 1

    def start_out(self, storage: torch.UntypedStorage, arena: Arena, offset: int) -> Timed:
        return self._start("out", storage)

    def start_back(self, storage: torch.UntypedStorage, arena: Arena, offset: int) -> Timed:
        return self._start("back", storage)

    def _start(self, way: str, storage: torch.UntypedStorage) -> Timed:
        lane = "out" if self.is_shared else way
        took_s = (self.latency_ms + storage.nbytes() / self.rates[way]) / 1e3
        self.free_s[lane] = max(self.free_s[lane], self.now_s) + took_s
        return Timed(self, self.free_s[lane])


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(("out", "back", "latency_ms"), [(4e6, 1e6, 0.1), (2e5, 3e5, 2.0)])
def test_a_link_is_measured_as_it_is_while_kernels_run(
    out: float, back: float, latency_ms: float, is_shared: bool
) -> None:
    link = Link(out, back, latency_ms, is_shared=is_shared)
    found = measured_link(link, torch.device("cpu"), lambda: link.now_s)
    assert found.out_bytes_per_ms == pytest.approx(out, rel=0.03)  # ticks and a page's own time
    assert found.in_bytes_per_ms == pytest.approx(back, rel=0.03)
    assert found.latency_ms == pytest.approx(latency_ms, abs=0.04)
    assert found.is_shared is is_shared
    assert link.products > 1000


def test_real_copies_are_measured_and_leave_nothing() -> None:
    copies = Host()
    found = measured_link(copies, torch.device("cpu"))
    assert min(found[:3]) > 0
    assert not copies._idle
