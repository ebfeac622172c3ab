"""Charts as SVG text: areas and lines over axes, readable on a phone.

Text is 11 units high in a chart of width 380, about the width of a phone in pixels. Colours are
classes, which the page styles for light and dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 380, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 12, 34


@dataclass
class Chart:
    """Axes from zero (or `x_from`) to given ends, with lines and areas."""

    label: str  # for screen readers
    x_to: float
    y_to: float
    x_text: Callable[[float], str]
    y_text: Callable[[float], str]
    x_title: str
    x_from: float = 0.0
    x_unit: float = 1.0  # unit in which ticks are round numbers
    y_unit: float = 1.0
    _parts: list[str] = field(default_factory=list)
    _hints: list[str] = field(default_factory=list)  # on top of all

    def bars(self, steps: Sequence[tuple[float, float, float]], kind: str) -> None:
        """Fill columns: (from, to, height)."""
        path = "".join(
            f"M{self._x(a):.2f} {self._y(0):.2f}V{self._y(h):.2f}H{self._x(b):.2f}"
            f"V{self._y(0):.2f}Z"
            for a, b, h in steps
        )
        self._parts.append(f'<path class="{kind}" d="{path}"/>')

    def say(self, texts: Sequence[tuple[float, float, str]]) -> None:
        """Say something of each column, (from, to, text), where the pointer is on it."""
        self._hints += [
            f'<rect class="say" x="{self._x(a):.2f}" y="{_TOP}" '
            f'width="{max(0.5, self._x(b) - self._x(a)):.2f}" '
            f'height="{HEIGHT - _TOP - _BOTTOM}"><title>{html.escape(text)}</title></rect>'
            for a, b, text in texts
        ]

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw a line through points."""
        text = " ".join(f"{self._x(x):.2f},{self._y(y):.2f}" for x, y in points)
        self._parts.append(f'<polyline class="{kind}" points="{text}"/>')

    def level(self, y: float, kind: str, text: str) -> None:
        """Draw a horizontal line with a text on it, at its start, where curves are low."""
        self.line([(self.x_from, y), (self.x_to, y)], kind)
        place = self._y(y) - 4 if self._y(y) > _TOP + 14 else self._y(y) + 12
        self._parts.append(
            f'<text class="{kind}" x="{_LEFT + 4}" y="{place:.2f}">{html.escape(text)}</text>'
        )

    def dot(self, point: tuple[float, float], kind: str, text: str) -> None:
        """Mark a point, with a text beside it."""
        x, y = self._x(point[0]), self._y(point[1])
        left = x > 0.65 * WIDTH  # at the right end the text goes to the left
        anchor, shift = ("end", -8) if left else ("start", 8)
        self._parts.append(f'<circle class="{kind}" cx="{x:.2f}" cy="{y:.2f}" r="5"/>')
        self._parts.append(
            f'<text class="{kind}" x="{x + shift:.2f}" y="{max(y - 8, _TOP + 8):.2f}" '
            f'text-anchor="{anchor}">{html.escape(text)}</text>'
        )

    def svg(self) -> str:
        """Return the chart."""
        grid = []
        for value in ticks(0.0, self.y_to, 4, self.y_unit):
            y = self._y(value)
            grid.append(f'<path class="grid" d="M{_LEFT} {y:.2f}H{WIDTH - _RIGHT}"/>')
            grid.append(
                f'<text x="{_LEFT - 5}" y="{y + 4:.2f}" text-anchor="end">'
                f"{html.escape(self.y_text(value))}</text>"
            )
        for value in ticks(self.x_from, self.x_to, 4, self.x_unit):
            x = self._x(value)
            at_the_end = x > WIDTH - _RIGHT - 25  # where half of the text would be cut off
            grid.append(
                f'<text x="{WIDTH - 1 if at_the_end else x:.2f}" y="{HEIGHT - _BOTTOM + 14}" '
                f'text-anchor="{"end" if at_the_end else "middle"}">'
                f"{html.escape(self.x_text(value))}</text>"
            )
        title = (
            f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 5}" text-anchor="middle">'
            f"{html.escape(self.x_title)}</text>"
        )
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{html.escape(self.label, quote=True)}">'
            + "".join([*grid, *self._parts, title, *self._hints])
            + "</svg>"
        )

    def _x(self, value: float) -> float:
        span = self.x_to - self.x_from or 1.0
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (value - self.x_from) / span

    def _y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / (self.y_to or 1.0)


def ticks(begin: float, end: float, count: int, unit: float = 1.0) -> list[float]:
    """Return at most `count` + 1 numbers from `begin` to `end` that are round in `unit`."""
    if end <= begin:
        return [begin]
    raw = (end - begin) / unit / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = unit * next(size * m for m in (1, 2, 5, 10) if size * m >= raw * 0.999999)
    first = math.ceil(begin / step - 1e-9)
    return [k * step for k in range(first, math.floor(end / step + 1e-9) + 1)]


def byte_unit(count: float) -> float:
    """Return the unit for this many bytes: 1, 1024, …"""
    return float(next((u for u in (1 << 30, 1 << 20, 1 << 10) if count >= u), 1))


def thinned(
    columns: Sequence[tuple[float, float, float]], x_to: float, *, most: int = 600
) -> list[tuple[float, float, float]]:
    """Join columns narrower than `x_to / most` with their neighbours, keeping maxima."""
    least = x_to / most
    result: list[tuple[float, float, float]] = []
    for begin, end, high in columns:
        if result and result[-1][1] == begin and end - result[-1][0] < least:
            last = result[-1]
            result[-1] = (last[0], end, max(last[2], high))
        else:
            result.append((begin, end, high))
    return result
