"""The report of a plan of blocks; printed, it shows what blocks keep and their extra time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from os import PathLike

from rockmate.blockwise.kinds import Kind
from rockmate.calls.planned_module import PlannedModule
from rockmate.files.plan_file import PlanFile
from rockmate.options.module_choice import Choice, StepMemory
from rockmate.options.options import BlockOption
from rockmate.reports.in_full import InFull
from rockmate.schedules.report import format_bytes, format_ms
from rockmate.whole_step.memory import Memory


@dataclass(frozen=True)
class ChosenBlocks:
    """The result: planned forwards by path of the block, and the choice of options."""

    forwards: Mapping[str, PlannedModule]
    kinds: Mapping[str, Kind]
    memory: StepMemory
    choice: Choice
    measured_peak_bytes: int
    keeping_all_bytes: int
    budget_bytes: int
    tested: StepMemory | None = None  # with the options that other budgets may choose


@dataclass(frozen=True, slots=True)
class BlockRow:
    """One block: the bytes that it keeps between forward and backward, its peak, its extra time."""

    path: str
    kept_bytes: int  # outputs included
    peak_bytes: int
    overhead_ms: float
    base_time_ms: float
    pieces: int | None = None  # of rows, in which its widest parts run
    moved_bytes: int = 0  # of what is elsewhere for a while

    @classmethod
    def of(cls, path: str, option: BlockOption, base_time_ms: float) -> BlockRow:
        """Return the row of a block that runs with an option."""
        sizes, pieces = (option.saved_bytes, option.peak_bytes), getattr(option.cut, "count", None)
        return cls(path, *sizes, option.overhead_ms, base_time_ms, pieces, option.moved_bytes)

    @property
    def overhead(self) -> float:
        """Recomputation as a fraction of the block's own time."""
        return self.overhead_ms / self.base_time_ms if self.base_time_ms else 0.0


@dataclass(frozen=True)
class BlocksPlan(InFull):
    """The options of all blocks, chosen within one budget.

    All bytes are of the whole step, above what is in use before it and the gradients. With
    `memory=` it changes once, when a step has shown what a loss outside takes.
    """

    rows: tuple[BlockRow, ...]
    budget_bytes: int
    peak_bytes: int  # predicted
    measured_peak_bytes: int  # of a whole step, the largest of all processes
    keeping_all_bytes: int  # predicted peak if every block keeps everything
    in_flight: int = 1
    free_overhead_ms: float | None = None  # of a plan of the whole model in the same budget
    why_no_free_plan: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    file: PlanFile | None = field(default=None, repr=False)
    memory: Memory | None = field(default=None, repr=False)  # if the user gave it, not a budget
    is_measured: bool = True  # or the measured peak is that of the choice before

    def become(self, other: BlocksPlan) -> None:
        """Show another plan from now on."""
        vars(self).update(vars(other))

    def save_plan(self, path: str | PathLike[str]) -> None:
        """Write the plan to a file, for `apply_to_blocks(..., plan=path)` at another start.

        The file is written atomically. One process is enough to write it.
        """
        assert self.file is not None
        self.file.save(path)

    @property
    def overhead_ms(self) -> float:
        """Time of all recomputation in one step."""
        return sum(row.overhead_ms for row in self.rows)

    @property
    def base_time_ms(self) -> float:
        """Time of all blocks in one step without recomputation."""
        return sum(row.base_time_ms for row in self.rows)

    @property
    def overhead(self) -> float:
        """Recomputation as a fraction of the time of all blocks."""
        return self.overhead_ms / self.base_time_ms if self.base_time_ms else 0.0

    @property
    def restriction_ms(self) -> float | None:
        """Extra time of a step compared with a plan of the whole model, or None if not known."""
        if self.free_overhead_ms is None:
            return None
        return self.overhead_ms - self.free_overhead_ms

    def __repr__(self) -> str:
        peak, budget = format_bytes(self.peak_bytes), format_bytes(self.budget_bytes)
        return f"<plan of {len(self.rows)} blocks: peak {peak} within {budget}>"

    def __str__(self) -> str:
        took = format_bytes(self.measured_peak_bytes)
        measured = f", {took} measured" if self.is_measured else ""
        extra = f"{format_ms(self.overhead_ms)}, {100 * self.overhead:.2f} % of the blocks' time"
        lines = [
            f"-- Plan of {len(self.rows)} blocks, each for itself",
            f"  budget          {format_bytes(self.budget_bytes)}",
            f"  peak            {format_bytes(self.peak_bytes)} predicted{measured}",
            f"  keeping all     {format_bytes(self.keeping_all_bytes)}",
            f"  extra time      {extra}",
            f"  free plan       {self._free_plan()}",
        ]
        if self.in_flight > 1:
            lines.append(f"  in flight       {self.in_flight} forwards before their backwards")
        lines.append(f"  {'blocks':<40}{'keeps':>12}{'peak':>12}{'extra time':>12}")
        for rows in _runs(self.rows):
            first = rows[0]
            name = first.path if len(rows) == 1 else f"{first.path} .. {rows[-1].path}"
            lines.append(
                f"  {name:<40}{format_bytes(first.kept_bytes):>12}"
                f"{format_bytes(first.peak_bytes):>12}{100 * first.overhead:>10.1f} %"
                + (f"  in {first.pieces} pieces of rows" if first.pieces else "")
                + (f"  {format_bytes(first.moved_bytes)} move" if first.moved_bytes else "")
            )
        return "\n".join(lines)

    def _free_plan(self) -> str:
        more = self.restriction_ms
        if more is None or self.free_overhead_ms is None:
            return f"not known: {self.why_no_free_plan}"
        share = f"{100 * more / self.base_time_ms:.2f} %" if self.base_time_ms else "nothing"
        return (
            f"{format_ms(self.free_overhead_ms)} extra for the whole model in the same budget, so "
            f"planning block by block costs {share} of the blocks' time"
        )


def report_of(chosen: ChosenBlocks, *, in_flight: int, reserve: int) -> BlocksPlan:
    """Return the report of a choice; `reserve` is a part of the budget, too."""
    rows = []
    for call, number in zip(chosen.memory.calls, chosen.choice.options, strict=True):
        time_ms = chosen.kinds[call.name].recorded.problem.base_time_ms
        rows.append(BlockRow.of(call.name, call.options[number], time_ms))
    return BlocksPlan(
        rows=tuple(rows),
        budget_bytes=chosen.budget_bytes + reserve,
        peak_bytes=chosen.choice.peak_bytes,
        measured_peak_bytes=chosen.measured_peak_bytes,
        keeping_all_bytes=chosen.keeping_all_bytes,
        in_flight=in_flight,
    )


def _runs(rows: Sequence[BlockRow]) -> list[list[BlockRow]]:
    """Group neighbours with equal options."""

    def worth(row: BlockRow) -> tuple[int | None, ...]:
        own = round(1000 * row.overhead)
        return row.kept_bytes, row.peak_bytes, own, row.pieces, row.moved_bytes

    return [list(group) for _, group in groupby(rows, key=worth)]
