"""A link to other memory, to which storages of a step may be moved.

Copies in one direction run one after the other. Rates are measured (`rkgb.copies`) or given, for a
device that is not here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

_PAGE_BYTES = 4096  # as what is moved takes on the other side (`rkgb.copies`)


@dataclass(frozen=True, slots=True)
class Link:
    """Rates of both directions, the time before a copy begins, and the bytes on the other side.

    Example: 12 GB/s out, 12 GB/s in, 20 us until a copy begins:
        >>> Link(12e6, 12e6, latency_ms=0.02)
    """

    out_bytes_per_ms: float
    in_bytes_per_ms: float
    latency_ms: float = 0.0
    is_shared: bool = False  # both directions take turns
    host_bytes: int | None = None  # most bytes on the other side; None: as many as there are

    def __post_init__(self) -> None:
        for name in ("out_bytes_per_ms", "in_bytes_per_ms"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"a link's {name} must be positive, and is {getattr(self, name)}")
        if not 0 <= self.latency_ms < math.inf:
            raise ValueError(f"a link's latency_ms is {self.latency_ms}")
        if self.host_bytes is not None and self.host_bytes < 0:
            raise ValueError(f"a link's host_bytes is {self.host_bytes}")

    def shared_by(self, count: int) -> Link:
        """Return the part of each of some processes that use it at the same time."""
        out, back = self.out_bytes_per_ms / count, self.in_bytes_per_ms / count
        return replace(self, out_bytes_per_ms=out, in_bytes_per_ms=back)

    def host_taken(self, size_bytes: int) -> int:
        """Return what a storage takes on the other side: whole pages."""
        return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES

    def holds(self, sizes: Iterable[int]) -> bool:
        """Return whether storages of these sizes fit on the other side together."""
        return self.host_bytes is None or sum(map(self.host_taken, sizes)) <= self.host_bytes

    def out_ms(self, size_bytes: int) -> float:
        """Return the time of a copy out."""
        return self.latency_ms + size_bytes / self.out_bytes_per_ms

    def in_ms(self, size_bytes: int) -> float:
        """Return the time of a copy in."""
        return self.latency_ms + size_bytes / self.in_bytes_per_ms
