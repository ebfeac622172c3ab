"""A graph in a notebook. What draws it lies above, and is put here when it is imported."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

_by: list[Callable[[Any], str | None]] = []


def draw_by(draw: Callable[[Any], str | None]) -> None:
    """Let notebooks show graphs by a function, which returns None where it cannot draw."""
    _by[:] = [draw]


class Drawn:
    """Something that a notebook shows as a picture, below its line of text."""

    def _repr_html_(self) -> str:
        pictures = [draw(self) for draw in _by]
        return f"<p>{escape(repr(self))}</p>{''.join(filter(None, pictures))}"
