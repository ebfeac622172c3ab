"""One table of the dynamic program for every budget, with headroom above the budget in slots.

Rounding sizes up to slots is safe but costs time, because the rounded peak is above the true one.
So the table reaches above the budget by a factor (`headroom`). A schedule from there is also taken
if its *true* peak is within the budget. 500 slots are then about as good as 4000 without headroom.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import psutil

from rotor._core import ChainTable
from rotor.errors import InfeasibleBudgetError, TableTooLargeError
from rotor.schedules.chain import Chain
from rotor.schedules.ops import Backward, ForwardCheckpoint, ForwardEnableGrad, ForwardNoGrad, Op
from rotor.schedules.simulate import Schedule

if TYPE_CHECKING:
    from rotor._core import StageTuple  # the stub's, not the extension's


__all__ = ["ChainTable", "CompiledTable", "chain_tuples"]


class CompiledTable:
    """Opt(a, b, m) over 0 <= m <= `slots` slots of `unit_bytes`, in float32 (see `csrc`).

    Raises:
        TableTooLargeError: the table would take more than `max_table_bytes` (default: the free
            memory); none is allocated.
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
        limit = psutil.virtual_memory().available if max_table_bytes is None else max_table_bytes
        if self._core.table_bytes > limit:
            raise TableTooLargeError(self._core.table_bytes, limit, len(chain), slots)
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


DEFAULT_SLOTS = 500
DEFAULT_HEADROOM = 1.25


def fastest_ops(chain: Chain) -> list[Op]:
    """Return the schedule of least time: every stage once, with its fastest option."""
    options = list(enumerate(chain.fastest_options))
    forward: list[Op] = [ForwardEnableGrad(k, o) for k, o in options]
    return forward + [Backward(k, o) for k, o in reversed(options)]


class ScheduleTable:
    """One table of the recurrence, read at any budget up to `headroom` times its own.

    Memory is in slots of `unit_bytes`. The table ends where the fastest schedule fits. It takes at
    most about `2 * n² * slots * headroom` bytes for n stages, less where stages repeat and where a
    run of stages is infeasible.

    Raises:
        TableTooLargeError: that is more than `max_table_bytes` (default: the free memory).
    """

    def __init__(
        self,
        chain: Chain,
        budget_bytes: int,
        *,
        slots: int = DEFAULT_SLOTS,
        headroom: float = DEFAULT_HEADROOM,
        max_table_bytes: int | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots is {slots}. Give at least 1; 500 is the default.")
        if headroom < 1:
            raise ValueError(f"headroom is {headroom}. Give a factor >= 1, such as 1.25.")
        self.chain = chain
        self.fastest = Schedule.from_ops(chain, fastest_ops(chain), "no recomputation")
        ceiling = min(max(budget_bytes, 1), max(self.fastest.peak_bytes, 1))
        self.unit_bytes = -(-ceiling // slots)
        top = min(int(ceiling * headroom), max(ceiling, self.fastest.peak_bytes))
        table_slots = max(top // self.unit_bytes, ceiling // self.unit_bytes)
        self._table = CompiledTable(
            chain, self.unit_bytes, table_slots, max_table_bytes=max_table_bytes
        )
        # Slots of one byte, without a table over them, give the exact smallest budget.
        self._exact = CompiledTable(chain, 1, 0)

    @property
    def smallest_feasible_bytes(self) -> int:
        """The smallest budget that a memory persistent schedule fits in, exact to the byte."""
        return self._exact.smallest_slot

    def candidates(self, budget_bytes: int) -> Iterator[Schedule]:
        """Yield distinct schedules, each faster, from the one for `budget_bytes` in slots upwards.

        The first ones fit in the budget if a slot below it is feasible. The later ones may not, so
        the caller checks their peaks. If the budget is feasible only without rounding, the schedule
        of smallest memory comes first. The schedule without recomputation comes last.
        """
        table = self._table
        begin = min(max(budget_bytes, 0) // table.unit, table.slots)
        best = float("inf")
        if begin < table.smallest_slot and budget_bytes >= self._exact.smallest_slot:
            tight = self._schedule(self._exact.tight_ops(budget_bytes))
            best = tight.makespan_ms
            yield tight
        previous = float("inf")
        for m in range(max(begin, table.smallest_slot), table.slots + 1):
            makespan = table.makespan(m)
            if makespan < previous:
                previous = makespan
                schedule = self._schedule(table.ops(m))
                if schedule.makespan_ms < best:
                    best = schedule.makespan_ms
                    yield schedule
        if self.fastest.makespan_ms < best:
            yield self.fastest

    def at(self, budget_bytes: int) -> Schedule | None:
        """Return the fastest schedule whose rounded peak is within the budget, or None.

        `budget_bytes` may lie above the caller's budget: its true peak may still fit.
        """
        table = self._table
        m = min(max(budget_bytes, 0) // table.unit, table.slots)
        return None if m < table.smallest_slot else self._schedule(table.ops(m))

    def solve(self, budget_bytes: int) -> Schedule:
        """Return the fastest candidate whose true peak is within the budget.

        Raises:
            InfeasibleBudgetError: no schedule fits; the error carries the minimum that would.
        """
        if self.fastest.peak_bytes <= budget_bytes:
            return self.fastest
        best = fastest_within(self.candidates(budget_bytes), budget_bytes)
        if best is None:
            raise InfeasibleBudgetError(budget_bytes, self.smallest_feasible_bytes, len(self.chain))
        return best

    def _schedule(self, ops: list[Op]) -> Schedule:
        return Schedule.from_ops(self.chain, ops, "dynamic program")


def fastest_within(candidates: Iterable[Schedule], budget_bytes: int) -> Schedule | None:
    """Return the fastest schedule whose simulated peak fits (the first of equals), or None."""
    fitting = (schedule for schedule in candidates if schedule.peak_bytes <= budget_bytes)
    return min(fitting, key=lambda schedule: schedule.makespan_ms, default=None)


solve_table = ScheduleTable  # its published name


def solve(
    chain: Chain,
    budget_bytes: int,
    *,
    slots: int = DEFAULT_SLOTS,
    headroom: float = DEFAULT_HEADROOM,
    max_table_bytes: int | None = None,
) -> Schedule:
    """Return a schedule of small makespan whose simulated peak is at most `budget_bytes`.

    Optimal among schedules that keep what they store, for sizes rounded up to `budget_bytes /
    slots`; larger `slots` is closer to optimal. Every budget that is feasible in bytes is accepted.

    Raises:
        InfeasibleBudgetError: no schedule fits; the error carries the minimum that would.
        TableTooLargeError: the table needs more than `max_table_bytes` (default: free memory).
    """
    table = ScheduleTable(
        chain, budget_bytes, slots=slots, headroom=headroom, max_table_bytes=max_table_bytes
    )
    return table.solve(budget_bytes)
