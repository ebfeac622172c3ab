"""What a probe has found, as a table for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
_WIDE = 100


def read(path: Path) -> list[Row]:
    """Return the rows of a file; one that was cut off is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def table(rows: Sequence[Row]) -> str:
    """Return the rows section by section, and how each ended."""
    lines: list[str] = []
    names = list(dict.fromkeys(row["section"] for row in rows))
    for name in names:
        own = [row for row in rows if row["section"] == name]
        ends = [row for row in own if set(row) <= {"section", "ended", "seconds"}]
        how = ", ".join(f"{row['ended']} ({row.get('seconds', 0)} s)" for row in ends)
        lines += ["", f"{name}: {how or 'cut off'}"]
        lines += [f"  {_line(row)}" for row in own if row not in ends]
    return "\n".join(lines[1:])


def failures(rows: Sequence[Row]) -> list[str]:
    """Return in a line each what went wrong: sections that did not end, errors, tests, budgets."""
    found = []
    for row in rows:
        over = int(row.get("allocated_bytes") or 0) - int(row.get("budget_bytes") or 1 << 62)
        if "error" in row or row.get("ended", "ok") not in ("ok", "passed", "skipped"):
            found.append(f"{row['section']}: {_line(row)}")
        elif over > 0:
            found.append(f"{row['section']}: {over} bytes over the budget: {_line(row)}")
    return found


def _line(row: Row) -> str:
    words = [f"{key} {_text(value)}" for key, value in row.items() if key != "section"]
    text = ", ".join(words)
    return text if len(text) <= 4 * _WIDE else f"{text[: 4 * _WIDE]}…"


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
