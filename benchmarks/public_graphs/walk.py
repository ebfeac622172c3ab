"""Runs a sequence of operations on a graph, by the rules of those who published it.

It shares nothing with the encoding and with rockmate's simulator. A result lives from the operation
that makes it to the last one that reads it before it is made anew; one that nobody reads lives
while it is made; a kept one lives to the end. This is what Moccasin's own check of a schedule
counts, and Checkmate's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from public_graphs.graph import OperationGraph


class WalkError(ValueError):
    """A sequence that does not compute the graph, or not within the budget."""


@dataclass(frozen=True)
class Walk:
    """What a sequence of operations takes."""

    time: int
    peak_bytes: int


def walk(graph: OperationGraph, sequence: Sequence[int], budget_bytes: int | None = None) -> Walk:
    """Return time and peak of a sequence of operations, by their places in the graph.

    Raises:
        WalkError: an operation reads what is not there, never runs, or the peak is too high.
    """
    made_at: dict[int, int] = {}  # when each operation ran last
    last_use: dict[tuple[int, int], int] = {}  # of what was made at a moment, by its number there
    for moment, place in enumerate(sequence):
        operation = graph.operations[place]
        for read, which in operation.reads:
            if read not in made_at:
                name = graph.operations[read].name
                raise WalkError(f"{graph.name}: {operation.name} reads {name}, which never ran")
            last_use[made_at[read], which] = moment
        made_at[place] = moment
    missing = len(graph.operations) - len(made_at)
    if missing:
        raise WalkError(f"{graph.name}: {missing} operations never run")

    change = [0] * (len(sequence) + 1)
    ran: set[int] = set()
    for moment, place in enumerate(sequence):
        for which, result in enumerate(graph.operations[place].results):
            end = last_use.get((moment, which), moment) + 1
            if result.is_kept:  # made anew, it takes room beside the first one for a moment
                end = moment + 1 if place in ran else len(sequence)
            change[moment] += result.size_bytes
            change[end] -= result.size_bytes
        ran.add(place)
    peak = held = 0
    for bytes_more in change:
        held += bytes_more
        peak = max(peak, held)
    if budget_bytes is not None and peak > budget_bytes:
        raise WalkError(f"{graph.name}: a peak of {peak} bytes, and a budget of {budget_bytes}")
    return Walk(sum(graph.operations[place].time for place in sequence), peak)
