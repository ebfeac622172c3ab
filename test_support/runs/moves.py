"""Moves of storages between their uses in a plan, drawn at random, and copies that take time."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence

from rkgb.copies import Host
from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.run import Move, movable_roots
from rkgb.run.graph.node_storages import storages_of


def drawn_moves(
    graph: SimplifiedGraph, steps: Sequence[tuple[str, int]], draw: random.Random
) -> list[Move]:
    """Return moves of some storages, each in some of the gaps between two uses of it."""
    movable, found = movable_roots(graph), []
    for storage in (s for made in storages_of(graph) for s in made if s.root in movable):
        users = {"F": (storage.producer, *storage.fwd_users), "B": storage.bwd_users}
        uses = [
            (t, kind == "F" and node == storage.producer)
            for t, (kind, node) in enumerate(steps)
            if node in users[kind]
        ]
        earliest = 0
        for (before, is_made), (after, is_made_then) in itertools.pairwise(uses):
            if is_made:
                earliest = before
            if is_made_then or after - before < 2 or draw.random() < 0.3:
                continue
            gone = draw.randrange(before, after)
            back = draw.randrange(gone + 1, after + 1)
            found.append(Move(storage.root, draw.randrange(earliest, gone + 1), gone, back))
            earliest = back
    draw.shuffle(found)
    return found


class SlowHost(Host):
    """Copies to memory of the host, each of which begins after a moment."""

    def __init__(self, draw: random.Random, most_ms: float = 1.0) -> None:
        super().__init__()
        self._draw, self._most_s = draw, most_ms / 1e3

    def _run(self, direction: str, held: list[object], offset: int) -> None:
        time.sleep(self._draw.random() * self._most_s)
        super()._run(direction, held, offset)
