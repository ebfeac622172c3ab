"""Schedules and memory over time as text, and as a small SVG picture."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path

from rotor.errors import format_bytes
from rotor.schedules.chain import Chain
from rotor.schedules.ops import Backward, ForwardCheckpoint, ForwardEnableGrad, ForwardNoGrad, Op
from rotor.schedules.simulate import MemoryTimeline, Schedule

TEXT_WIDTH, BAR_WIDTH, MOST_BARS = 96, 48, 24
LEGEND = (
    "Fn: forward, input forgotten   Fc: forward, input kept   "
    "Fe: forward, kept for backward (Fe*: without its input)   B: backward"
)


def schedule_text(schedule: Schedule) -> str:
    """Return the operations, equal neighbours joined: `Fc(0) Fn(1..4) Fe(5)`."""
    words = []
    for kind, group in itertools.groupby(schedule.ops, key=_kind):
        for run in _consecutive([op.stage for op in group]):
            first, last = run[0], run[-1]
            words.append(f"{kind}({first})" if first == last else f"{kind}({first}..{last})")
    return textwrap.fill(
        " ".join(words), TEXT_WIDTH, break_long_words=False, break_on_hyphens=False
    )


def timeline_text(timeline: MemoryTimeline, held_bytes: int) -> str:
    """Return one bar for each operation; if there are too many, the highest bar of each group.

    `#` is what is held after the operation, `-` what it needs on top while it runs.
    """
    highest = max(timeline.peak_bytes + held_bytes, 1)
    per_row = -(-len(timeline.rows) // MOST_BARS)
    lines = []
    for start in range(0, len(timeline.rows), per_row):
        row = max(timeline.rows[start : start + per_row], key=lambda r: r.peak_bytes)
        peak = (row.peak_bytes + held_bytes) * BAR_WIDTH // highest
        after = min((row.after_bytes + held_bytes) * BAR_WIDTH // highest, peak)
        bar = "#" * after + "-" * (peak - after)
        size = (row.peak_bytes + held_bytes) / 2**20
        lines.append(f"{row.op!s:>9} |{bar:<{BAR_WIDTH}}| {size:9.2f} MiB")
    return "\n".join(lines)


def plan_text(chain: Chain, schedule: Schedule, held_bytes: int, limit_bytes: int | None) -> str:
    """Return a plan as readable text: limit, peak, makespan, schedule and memory."""
    fastest = sum(
        stage.options[o].fwd_time_ms + stage.options[o].bwd_time_ms
        for stage, o in zip(chain.stages, chain.fastest_options, strict=True)
    )
    again = schedule.forward_count - len(chain)
    overhead = 100 * (schedule.makespan_ms / fastest - 1) if fastest else 0.0
    limit = "none" if limit_bytes is None else format_bytes(limit_bytes)
    return "\n".join(
        [
            f"method     {schedule.method}",
            f"limit      {limit}",
            f"peak       {format_bytes(schedule.peak_bytes + held_bytes)}, predicted",
            f"makespan   {schedule.makespan_ms:.3f} ms, predicted; {overhead:.1f} % above the "
            f"{fastest:.3f} ms without recomputation",
            f"recomputes {again} of {schedule.forward_count} forward operations",
            schedule_text(schedule),
            LEGEND,
            timeline_text(schedule.timeline(chain), held_bytes),
        ]
    )


def save_timeline(timeline: MemoryTimeline, path: str | Path, held_bytes: int = 0) -> None:
    """Write memory over time as an SVG file: one bar per operation, as wide as its time."""
    width, height = 900, 260
    total_ms = timeline.makespan_ms or 1.0
    highest = max(timeline.peak_bytes + held_bytes, 1)
    colours = {"Fn": "#9aa5b1", "Fc": "#5b8def", "Fe": "#2f9e6e", "Fe*": "#1b6e4b", "B": "#d9822b"}
    shapes = []
    x = 0.0
    for row in timeline.rows:
        bar_width = row.time_ms / total_ms * width
        bar_height = (row.peak_bytes + held_bytes) / highest * height
        shapes.append(
            f'<rect x="{x:.2f}" y="{height - bar_height + 20:.2f}" width="{bar_width:.2f}" '
            f'height="{bar_height:.2f}" fill="{colours[_kind(row.op)]}">'
            f"<title>{row.op}: {row.peak_bytes + held_bytes} bytes</title></rect>"
        )
        x += bar_width
    legend = "  ".join(
        f'<tspan fill="{colour}">{kind} </tspan>' for kind, colour in colours.items()
    )
    Path(path).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 45}" '
        f'font-family="sans-serif" font-size="13">'
        f'<text x="0" y="14">peak {format_bytes(highest)}, makespan {total_ms:.3f} ms  '
        f"{legend}</text>{''.join(shapes)}"
        f'<text x="0" y="{height + 38}">time, each bar one operation</text></svg>\n'
    )


def _kind(op: Op) -> str:
    match op:
        case ForwardNoGrad():
            return "Fn"
        case ForwardCheckpoint():
            return "Fc"
        case ForwardEnableGrad():
            return "Fe*" if op.forget_input else "Fe"
        case Backward():
            return "B"


def _consecutive(numbers: list[int]) -> list[list[int]]:
    """Cut a list into runs that rise by one at each step, or fall by one."""
    runs: list[list[int]] = []
    for number in numbers:
        run = runs[-1] if runs else []
        step = number - run[-1] if run else 0
        if abs(step) == 1 and (len(run) < 2 or step == run[1] - run[0]):
            run.append(number)
        else:
            runs.append([number])
    return runs
