"""The rows of `step.csv` in words, and as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness.experiment import measured_where, read_rows
from harness.meter import markdown_table
from steps.cases import subjects as step_subjects


def step_figure(row: Mapping[str, str], precise: bool = False) -> str:
    """Return what one row of `step.csv` says; `precise` adds the spread of the rounds."""
    if row["status"] != "ok":
        return row["status"]
    if row["kind"] == "capture":
        low, high = row["capture_seconds_low"], row["capture_seconds_high"]
        spread = f" ({float(low):.2f}–{float(high):.2f})" if precise else ""
        return f"{float(row['capture_seconds']):.2f} s{spread}"
    if row["kind"] == "planned":
        planned = float(row["planned_overhead_percent"])
        measured = float(row["measured_overhead_percent"])
        difference = float(row["measured_minus_planned_points"])
        return f"{difference:+.1f} points ({measured:+.1f} − {planned:.1f})"
    words = f"×{float(row['time_ratio']):.2f}"
    if precise:
        low, high = float(row["time_ratio_low"]), float(row["time_ratio_high"])
        words = f"×{float(row['time_ratio']):.3f} ({low:.3f}–{high:.3f})"
        words += f", {float(row['step_ms']):.2f} ms over {float(row['plain_step_ms']):.2f} ms"
    if row["flops_ratio"]:
        words += f", FLOPs ×{float(row['flops_ratio']):.2f}"
    if row.get("guards_us"):
        words += f", guards {float(row['guards_us']):.0f} µs"
    words += ", in the least budget that fits" if row["least_budget"] else ""
    return words + (", self-test failed" if row["self_test"] else "")


def step_value(row: Mapping[str, str]) -> float:
    """Return the figure of a row that its aim is for; NaN where there is none."""
    column = {"capture": "capture_seconds", "planned": "measured_minus_planned_points"}
    return float(row[column.get(row["kind"], "time_ratio")] or "nan")


def step_verdict(row: Mapping[str, str]) -> str:
    """Return the aim of a row in words, and whether it is reached."""
    if not row["target"]:
        return ""
    reached = row["status"] == "ok" and step_value(row) <= float(row["target"])
    return f"  (aim {row['target']}: {'reached' if reached else 'missed'})"


def step_table(results: Path) -> str:
    """Return a line for each subject and contender, and a column for each checkout."""
    rows = read_rows(results / "step.csv")
    if not rows:
        return ""
    titles = {subject.name: subject.title for subject in step_subjects()}
    words = {
        "step": "step at 100 %",
        "recomputed": "every block recomputed",
        "capture": "capture",
        "planned": "measured − planned",
    }
    checkouts = list(dict.fromkeys((row["which"], row["commit"]) for row in rows))
    lines = []
    for name, strategy in dict.fromkeys((row["name"], row["strategy"]) for row in rows):
        own = {r["which"]: r for r in rows if (r["name"], r["strategy"]) == (name, strategy)}
        first = next(iter(own.values()))
        title = f"{words[first['kind']]}: {titles.get(name, name)}"
        cells = [step_figure(own[which]) if which in own else "—" for which, _ in checkouts]
        if first["kind"] == "recomputed":
            title += f", {strategy}"
        lines.append([title, first["target"] or "—", *cells])
    header = ["CPU time of one thread, over plain PyTorch's", "aim"]
    header += [f"{which} ({commit})" for which, commit in checkouts]
    return markdown_table(header, lines) + "\n" + measured_where(rows)
