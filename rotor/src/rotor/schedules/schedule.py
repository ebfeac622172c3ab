"""The answer: a sequence of operations with its predicted time and memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rotor.schedules.chain import Chain
from rotor.schedules.ops import Backward, Op
from rotor.schedules.simulate import MemoryTimeline, simulate


@dataclass(frozen=True, slots=True)
class Schedule:
    """Operations that compute every gradient of a chain, and their simulated time and peak."""

    ops: tuple[Op, ...]
    makespan_ms: float
    peak_bytes: int
    method: str = "dynamic program"

    @classmethod
    def from_ops(cls, chain: Chain, ops: Iterable[Op], method: str) -> Schedule:
        """Return the schedule of `ops`, checked and costed by the simulator."""
        sequence = tuple(ops)
        timeline = simulate(chain, sequence)
        return cls(sequence, timeline.makespan_ms, timeline.peak_bytes, method)

    def timeline(self, chain: Chain) -> MemoryTimeline:
        """Return what the schedule holds over time on `chain`."""
        return simulate(chain, self.ops)

    @property
    def forward_count(self) -> int:
        """The number of forward operations; without recomputation, one per stage."""
        return sum(not isinstance(op, Backward) for op in self.ops)

    def __str__(self) -> str:
        return " ".join(str(op) for op in self.ops)
