"""The report of a plan by blocks; printed, it shows what the blocks keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path

from rockmate.blockwise.report import BlockRow, BlocksPlan
from rockmate.comparison.eager import StepResult
from rockmate.decisions.blocks import SeenCall
from rockmate.errors import PlanFileError
from rockmate.schedules.report import format_bytes


@dataclass(frozen=True)
class DecidedPlan(BlocksPlan):
    """The options of all calls of blocks in the sample's step, chosen within one budget.

    `rows` are the calls in order; a block that is called several times has several rows.
    """

    name: str = ""  # of the root's class
    why: str = ""  # why it is not recorded as a whole
    unseen: tuple[str, ...] = ()  # blocks that did not run in the sample's step
    offload: str | None = None  # asked for with a limit, and of no use here

    @property
    def opaque(self) -> tuple[str, ...]:
        """Paths of opaque calls: the root, whose Python runs at every step."""
        return ("",)

    @property
    def overhead_percent(self) -> float:
        """Recomputation in percent of the time of all blocks."""
        return 100 * self.overhead

    def summary(self) -> str:
        """Return one line: the peak, the budget, the extra time."""
        return (
            f"peak {format_bytes(self.measured_peak_bytes)} within "
            f"{format_bytes(self.budget_bytes)}, without recomputation "
            f"{format_bytes(self.keeping_all_bytes)}; {self.overhead_percent:.2f} % more time of "
            "its blocks"
        )

    def save_plan(self, path: str | PathLike[str]) -> None:
        """Raise PlanFileError: a plan by blocks of such a root has no file."""
        raise no_file(self.name)

    def html(self, path: str | PathLike[str], *, points: int = 7) -> Path:
        """Write the text of the report as a page, without a curve, and return its path."""
        path = Path(path)
        title = f"Plan of {escape(self.name)}"
        text = f"<!doctype html><title>{title}</title><pre>{escape(str(self))}</pre>\n"
        path.write_text(text, encoding="utf-8")
        return path

    def source(self) -> str:
        """Return a comment: there is no program of the whole step."""
        return f"# {self.name} runs its own Python, and {len(self.rows)} calls run planned\n"

    def __str__(self) -> str:
        count = len({row.path.partition(" (")[0] for row in self.rows}) + len(self.unseen)
        head = [
            f"-- Plan of {self.name}: {self.why}",
            f"  its own Python runs at every step, and its {count} blocks are planned one by one",
        ]
        lines = super().__str__().splitlines()[1:]
        lines = [line for line in lines if not line.startswith("  free plan")]
        if self.unseen:
            lines.append(f"  not called for the sample: {', '.join(self.unseen)}")
        if self.offload is not None:
            lines.append(
                f"  nothing moves: offload={self.offload!r} with host_budget= is for a step that "
                "is planned whole"
            )
        return "\n".join(head + lines)

    def __repr__(self) -> str:
        return f"<plan of {self.name}: {self.summary()}>"


def no_file(name: str) -> PlanFileError:
    return PlanFileError(
        f"{name} decides by values, so that its blocks are planned one by one, and such a plan is "
        "not written to a file. Plan anew at the next start, which takes some steps, or plan the "
        "blocks in place: rockmate.apply_to_blocks(model, sample, budget) has a file."
    )


def report(
    name: str,
    why: str,
    calls: Sequence[SeenCall],
    unseen: Sequence[SeenCall],
    numbers: Sequence[int],
    budget_bytes: int,
    step: StepResult,
    eager: StepResult | None,
) -> DecidedPlan:
    """Return the report of a choice with the figures of its tested step."""
    counts = Counter(call.block.path for call in calls)
    seen: Counter[str] = Counter()
    rows = []
    for call, number in zip(calls, numbers, strict=True):
        path = call.block.path
        seen[path] += 1
        which = f" (call {seen[path]})" if counts[path] > 1 else ""
        time_ms = call.kind.recorded.problem.base_time_ms
        rows.append(BlockRow.of(path + which, call.options[number], time_ms))
    peak = step.allocated_peak_bytes
    return DecidedPlan(
        rows=tuple(rows),
        budget_bytes=budget_bytes,
        peak_bytes=peak,
        measured_peak_bytes=peak,
        keeping_all_bytes=peak if eager is None else eager.allocated_peak_bytes,
        name=name,
        why=why,
        unseen=tuple(call.block.path for call in unseen),
    )
