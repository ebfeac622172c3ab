"""Typed stub of the compiled dynamic program; `test_support/oracles/recurrence.py` specifies it."""

from collections.abc import Sequence

OptionTuple = tuple[int, int, int, float]
"""saved, fwd_overhead, bwd_overhead (bytes), forward + backward (ms)"""
StageTuple = tuple[int, int, int, float, Sequence[OptionTuple]]
"""output, output_grad, forward_peak (bytes), forward (ms), options"""
OpTuple = tuple[int, int, int]
"""kind (0 Fn, 1 Fc, 2 Fe, 3 B), stage, option (-1 where there is none)"""

class ChainTable:
    """Opt(a, b, m) for all 0 <= m <= slots; the constructor computes all that is free of m."""

    def __init__(
        self, stages: Sequence[StageTuple], unit_bytes: int, slots: int, *, share: bool = True
    ) -> None: ...
    @property
    def table_bytes(self) -> int:
        """What `fill` will allocate (or has): the table, and room to work in that it gives back."""
    @property
    def cell_count(self) -> int:
        """Rows of the table: distinct runs of stages."""
    @property
    def updates(self) -> int:
        """Table entries that `fill` has compared with a candidate."""
    @property
    def smallest_slot(self) -> int:
        """Smallest feasible m; it may lie above the table."""
    def fill(self) -> None:
        """Allocate and compute the table, with the GIL released."""
    def makespan(self, m: int) -> float:
        """Opt of the whole chain in ms, infinite if infeasible."""
    def ops(self, m: int) -> list[OpTuple]:
        """A schedule that attains `makespan(m)`."""
    def tight_ops(self, m: int) -> list[OpTuple]:
        """Some schedule for any m >= smallest_slot, found without the table."""
