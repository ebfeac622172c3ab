"""Adapter to the compiled recurrence: same methods as `recurrence.ReferenceTable`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rotor._core import ChainTable
from rotor.errors import TableTooLargeError
from rotor.schedules.chain import Chain
from rotor.schedules.ops import Backward, ForwardCheckpoint, ForwardEnableGrad, ForwardNoGrad, Op

if TYPE_CHECKING:
    from rotor._core import StageTuple  # the stub's, not the extension's

__all__ = ["ChainTable", "CompiledTable", "chain_tuples"]


class CompiledTable:
    """Opt(a, b, m) over 0 <= m <= `slots` slots of `unit_bytes`, in float32.

    Raises:
        TableTooLargeError: the table would take more than `max_table_bytes`; none is allocated.
    """

    def __init__(
        self,
        chain: Chain,
        unit_bytes: int,
        slots: int,
        *,
        max_table_bytes: int | None = None,
        share: bool = True,
    ) -> None:
        self.unit = unit_bytes
        self.slots = slots
        self._core = ChainTable(chain_tuples(chain), unit_bytes, slots, share=share)
        if max_table_bytes is not None and self._core.table_bytes > max_table_bytes:
            raise TableTooLargeError(self._core.table_bytes, max_table_bytes, len(chain), slots)
        self._core.fill()

    @property
    def table_bytes(self) -> int:
        """The size of the table of makespans."""
        return self._core.table_bytes

    @property
    def smallest_slot(self) -> int:
        """The smallest feasible m; it may lie above the table."""
        return self._core.smallest_slot

    def makespan(self, m: int) -> float:
        """Opt(0, last, m) in milliseconds, infinite if infeasible."""
        return self._core.makespan(m)

    def ops(self, m: int) -> list[Op]:
        """Return a schedule that attains `makespan(m)`."""
        return [_to_op(*encoded) for encoded in self._core.ops(m)]

    def tight_ops(self, m: int) -> list[Op]:
        """Return some schedule for any m >= `smallest_slot`, also above the table."""
        return [_to_op(*encoded) for encoded in self._core.tight_ops(m)]


def chain_tuples(chain: Chain) -> list[StageTuple]:
    """Return the chain as the plain tuples that the extension reads."""
    return [
        (
            stage.output_bytes,
            stage.output_grad_bytes,
            stage.forward_peak_bytes,
            stage.forward_time_ms,
            [
                (
                    option.saved_bytes,
                    option.fwd_overhead_bytes,
                    option.bwd_overhead_bytes,
                    option.fwd_time_ms + option.bwd_time_ms,
                )
                for option in stage.options
            ],
        )
        for stage in chain.stages
    ]


def _to_op(kind: int, stage: int, option: int) -> Op:
    if kind == 0:
        return ForwardNoGrad(stage)
    if kind == 1:
        return ForwardCheckpoint(stage)
    if kind == 2:
        return ForwardEnableGrad(stage, option)
    return Backward(stage, option)
