"""Which runs of nodes are worth cutting: those that contain the largest values.

A run grows around the largest value that is in no run yet, until all values at its ends are at most
half as large. The head of a language model is one run from hidden states to loss; a block of two
linear layers is one run around its hidden layer. What makes its inputs out of smaller values, as an
upsampling does, and for it alone, is in the run, too, unless it cannot be cut.
"""

from __future__ import annotations

from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.run.graph.node_storages import NodeStorage, storages_of

Run = tuple[int, ...]
_LONGEST = 24  # nodes
_NARROWEST = 16  # values below this fraction of the largest are left alone


def wide_runs(sg: SimplifiedGraph) -> list[tuple[Run, str]]:
    """Return runs of nodes, each with its largest value, the largest first.

    A run that may begin earlier comes before the same run without that beginning.
    """
    storages = [s for made in storages_of(sg) for s in made if not s.is_output]
    storages.sort(key=lambda s: (-s.size_bytes, s.producer))
    found: list[tuple[Run, str]] = []
    taken: set[int] = set()
    for storage in storages:
        if storage.size_bytes * _NARROWEST < storages[0].size_bytes:
            break
        grown = _grown(storage, storages)
        run = _without_draws(sg, grown)
        if run and len(run) <= _LONGEST and taken.isdisjoint(run):
            inside = (other for other in storages if other.producer in run)
            wide = next(inside, storage).root
            first = _beginning(grown, storages)
            if first < grown[0] and taken.isdisjoint(range(first, grown[0])):
                found.append((_without_draws(sg, tuple(range(first, grown[-1] + 1))), wide))
            found.append((run, wide))
            taken.update(run)
    return found


def _grown(storage: NodeStorage, storages: list[NodeStorage]) -> Run:
    first, last = min(_uses(storage)), max(_uses(storage))
    wide = [s for s in storages if 2 * s.size_bytes > storage.size_bytes]
    while last - first < _LONGEST:
        low, high = first, last
        for other in wide:
            start, *ends = _uses(other)
            if any(first <= use <= last for use in (start, *ends)):  # made or read within the run
                low, high = min(low, start), max(high, start, *ends)
        if (low, high) == (first, last):
            break
        first, last = low, high
    return tuple(range(first, last + 1))


def _beginning(run: Run, storages: list[NodeStorage]) -> int:
    """Return the first of the nodes before a run that make twice what they read, for it alone."""
    first = run[0]
    while first:
        made = [s for s in storages if s.producer == first - 1]
        read = sum(s.size_bytes for s in storages if first - 1 in s.fwd_users)
        ends = [end for s in made for end in (*s.fwd_users, *s.bwd_users)]
        if not ends or max(ends) > run[-1] or sum(s.size_bytes for s in made) < 2 * read:
            break
        first -= 1
    return first


def _without_draws(sg: SimplifiedGraph, run: Run) -> Run:
    """Return a run without what only draws for it, as the mask of a dropout.

    It is drawn for all rows at once, as in eager, and read by rows.
    """
    return tuple(i for i in run if not sg.nodes[i].is_random or sg.nodes[i].deps)


def _uses(storage: NodeStorage) -> tuple[int, ...]:
    """Return the maker of a storage and its readers."""
    return (storage.producer, *storage.fwd_users, *storage.bwd_users)
