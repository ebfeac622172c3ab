"""Which runs of nodes are worth cutting: those that contain the largest values.

A run grows around the largest value that is in no run yet, until all values at its ends are at most
half as large. The head of a language model is one run from hidden states to loss; a block of two
linear layers is one run around its hidden layer.
"""

from __future__ import annotations

from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.run.graph.node_storages import NodeStorage, storages_of

Run = tuple[int, ...]
_LONGEST = 24  # nodes
_NARROWEST = 16  # values below this fraction of the largest are left alone


def wide_runs(sg: SimplifiedGraph) -> list[tuple[Run, str]]:
    """Return runs of nodes, each with its largest value, the largest first."""
    storages = [s for made in storages_of(sg) for s in made if not s.is_output]
    storages.sort(key=lambda s: (-s.size_bytes, s.producer))
    found: list[tuple[Run, str]] = []
    taken: set[int] = set()
    for storage in storages:
        if storage.size_bytes * _NARROWEST < storages[0].size_bytes:
            break
        run = _without_draws(sg, _grown(storage, storages))
        if run and len(run) <= _LONGEST and taken.isdisjoint(run):
            inside = (other for other in storages if other.producer in run)
            found.append((run, next(inside, storage).root))
            taken.update(run)
    return found


def _grown(storage: NodeStorage, storages: list[NodeStorage]) -> Run:
    first, last = _reach(storage)
    wide = [s for s in storages if 2 * s.size_bytes > storage.size_bytes]
    while last - first < _LONGEST:
        low, high = first, last
        for other in wide:
            start, end = _reach(other)
            if start <= last and end >= first:  # made or read within the run
                low, high = min(low, start), max(high, end)
        if (low, high) == (first, last):
            break
        first, last = low, high
    return tuple(range(first, last + 1))


def _without_draws(sg: SimplifiedGraph, run: Run) -> Run:
    """Return a run without what only draws for it, as the mask of a dropout.

    It is drawn for all rows at once, as in eager, and read by rows.
    """
    return tuple(i for i in run if not sg.nodes[i].is_random or sg.nodes[i].deps)


def _reach(storage: NodeStorage) -> tuple[int, int]:
    """Return the live range of a storage: its maker and its last reader."""
    return storage.producer, max((storage.producer, *storage.fwd_users, *storage.bwd_users))
