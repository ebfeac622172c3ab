"""A plan as plain text."""

from __future__ import annotations


def format_bytes(count: int) -> str:
    """Return bytes in binary units: `1.20 GiB`."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{count} bytes" if unit == "bytes" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
