"""Where each byte of a step goes: a table, a bar, and a refusal with both."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from rockmate.errors import InfeasibleBudgetError
from rockmate.files.plan_file import save_text
from rockmate.schedules.report import exact_bytes, format_bytes

GRADIENTS, LOSS = "gradients", "loss outside of the module"
SEEN = f"{LOSS}, as seen"
_COLOURS = ("#4c78a8", "#72b7b2", "#f58518", "#e45756", "#54a24b", "#b279a2", "#9d755d")
_UNUSED = "#e5e5e5"


@dataclass(frozen=True)
class Part:
    """Something that takes memory."""

    name: str
    size_bytes: int


@dataclass(frozen=True)
class Coming:
    """What a backward brings beside activations, where none of it is there before.

    That is the gradients of parameters, one after the other; or, where they go as they come, the
    room for one of them and its step.
    """

    gradients: bool
    size_bytes: int


@dataclass(frozen=True)
class Memory:
    """What a whole training step takes of `asked_bytes`; printing it shows a line for each part.

    The `parts` are there all the time, and the rest is the budget of forward and backward. Once
    these are over, the optimizer steps: `stepping` is what is there then instead of activations.
    """

    asked_bytes: int
    parts: tuple[Part, ...]
    stepping: tuple[Part, ...]
    peak_bytes: int | None = None  # of forward and backward, as planned
    fragments_bytes: int = 0  # a share of all, among the parts
    coming: Coming | None = None  # of the parts, what is not there before the backward
    loss_bytes: int = 0  # what a loss outside may take, before it is seen

    @property
    def resident_bytes(self) -> int:
        """What is there whatever is planned."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def budget_bytes(self) -> int:
        """What is left to forward and backward: the budget to plan within."""
        return self.asked_bytes - self.resident_bytes

    @property
    def stepping_bytes(self) -> int:
        """What is there while the optimizer steps, beside the parts."""
        return sum(part.size_bytes for part in self.stepping)

    def using_room_to_come(self) -> Memory:
        """Return the same where activations use the room of what is `coming`."""
        parts = tuple(part for part in self.parts if part.name != GRADIENTS)
        assert self.coming is not None
        own = Part(GRADIENTS, self.coming.size_bytes)
        then = (own,) if self.coming.gradients else ()
        return replace(self, parts=parts, stepping=(*then, *self.stepping))

    def with_loss(self, taken_bytes: int) -> Memory:
        """Return the same where a loss outside takes so much."""
        rest = (part for part in self.parts if part.name != LOSS)
        return replace(self, parts=(*rest, Part(SEEN, taken_bytes)))

    def holds(self) -> bool:
        """Whether the optimizer can step, and something is left to forward and backward."""
        return self.budget_bytes > 0 and self.stepping_bytes <= self.budget_bytes

    def least_bytes(self, budget_bytes: int) -> int:
        """Return the memory that leaves so large a budget, and in which the optimizer can step."""
        needed = self.resident_bytes + max(budget_bytes, self.stepping_bytes)
        if not self.fragments_bytes:
            return needed
        needed -= self.fragments_bytes  # which grow with the whole
        return 1 + -(-needed * self.asked_bytes // (self.asked_bytes - self.fragments_bytes))

    def refusal(self, error: InfeasibleBudgetError) -> InfeasibleBudgetError:
        """Return what to say where no plan fits into what is left."""
        least_bytes = self.least_bytes(error.minimum_bytes)
        bound_bytes = self.least_bytes(error.bound_bytes) if error.bound_bytes else 0
        return error.reworded(
            f"memory of {exact_bytes(self.asked_bytes)} is too little "
            f"for a whole step, which takes at least {exact_bytes(least_bytes)}: "
            f"{error.minimum_bytes} of them for forward and "
            f"backward. Give memory={least_bytes}, or reduce the batch size, as for CUDA out of "
            f"memory.\n{self}",
            asked_bytes=self.asked_bytes,
            minimum_bytes=least_bytes,
            bound_bytes=bound_bytes,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return every figure, for JSON."""
        return {
            "asked_bytes": self.asked_bytes,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "parts": {part.name: part.size_bytes for part in self.parts},
            "stepping": {part.name: part.size_bytes for part in self.stepping},
        }

    def __str__(self) -> str:
        lines = [_row(part.name, part.size_bytes) for part in self.parts]
        left, planned = self.budget_bytes, self.peak_bytes
        used = f"  ({format_bytes(planned)} planned)" if planned is not None else ""
        lines.append(_row("left to forward and backward", max(0, left)) + used)
        if left < 0:
            lines.append(_row("missing", -left))
        lines += [_row(f"then, {part.name}", part.size_bytes) for part in self.stepping]
        return "\n".join([f"memory of a whole step: {format_bytes(self.asked_bytes)}", *lines])

    def html(self, path: str | PathLike[str]) -> Path:
        """Write a page with a bar of the parts, and return its path."""
        head = '<!doctype html><meta charset="utf-8"><title>memory of a whole step</title>'
        save_text(path, f"{head}\n{self._repr_html_()}\n")
        return Path(path)

    def _repr_html_(self) -> str:
        """Return a bar of the parts, for a notebook."""
        left = max(0, self.budget_bytes)
        planned = min(left, self.peak_bytes or left)
        unused = Part("not used", left - planned)
        used = (*self.parts, Part("forward and backward", planned))
        pairs = (*zip(used, itertools.cycle(_COLOURS), strict=False), (unused, _UNUSED))
        drawn = [(part, colour) for part, colour in pairs if part.size_bytes]
        return "".join(
            [
                '<div style="font:12px sans-serif;max-width:60em">',
                '<div style="display:flex;height:1.6em">',
                *(_bar(part, colour, self.asked_bytes) for part, colour in drawn),
                '</div><div style="display:flex;flex-wrap:wrap;gap:0 1.5em;margin-top:.4em">',
                *(_label(part, colour) for part, colour in drawn),
                f"</div><pre>{escape(str(self))}</pre></div>",
            ]
        )


def _bar(part: Part, colour: str, whole_bytes: int) -> str:
    share = 100 * part.size_bytes / max(1, whole_bytes)
    title = f"{escape(part.name)}: {format_bytes(part.size_bytes)}"
    return f'<div style="flex:0 1 {share:.2f}%;background:{colour}" title="{title}"></div>'


def _label(part: Part, colour: str) -> str:
    square = f'<span style="color:{colour}">&#9632;</span>'
    return f"<span>{square} {escape(part.name)}, {format_bytes(part.size_bytes)}</span>"


def _row(name: str, size_bytes: int) -> str:
    return f"  {name:<38}{format_bytes(size_bytes):>14}"
