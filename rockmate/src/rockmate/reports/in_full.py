"""Answers that a notebook shows in full, as printing does, and that are one line elsewhere."""

from __future__ import annotations

from html import escape


class InFull:
    """An answer whose `str` is a table, in letters of one width."""

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"
