"""The outputs from which each output was computed, according to autograd's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rkgb.graphs.basic import Flow

# The end of an edge of autograd's graph: a node, and the index of its result.
Edge = tuple[Any, int]


def edge_of(root: Tensor) -> Edge:
    """Return the edge at which gradients enter for a tensor."""
    return root.grad_fn, root.output_nr


def flows_of(roots: Sequence[Tensor]) -> tuple[Flow, ...]:
    """Return the flow of each output, or () if there is only one output."""
    if len(roots) < 2:
        return ()
    places = {edge_of(root): place for place, root in enumerate(roots)}
    reached = _reached([root.grad_fn for root in roots], places)
    uses: dict[int, int] = {}
    for node in reached:
        for edge in node.next_functions:
            if edge in places:
                uses[places[edge]] = uses.get(places[edge], 0) + 1
    found = (tuple(sorted(reached[root.grad_fn])) for root in roots)
    return tuple(Flow(reaches, uses.get(place, 0)) for place, reaches in enumerate(found))


def _reached(starts: Sequence[Any], places: dict[Edge, int]) -> dict[Any, frozenset[int]]:
    """Return for every node the outputs that it reaches directly, not through other outputs."""
    found: dict[Any, frozenset[int]] = {}
    waiting = list(starts)
    nothing = frozenset[int]()
    while waiting:
        node = waiting[-1]
        if node in found:
            waiting.pop()
            continue
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        # Nodes below come first; also nodes below outputs, for the outputs' own flows.
        unknown = [source for source, _ in edges if source not in found]
        if unknown:
            waiting += unknown
            continue
        direct = frozenset(places[edge] for edge in edges if edge in places)
        through = (found[edge[0]] for edge in edges if edge not in places)
        found[node] = direct.union(*(through or (nothing,)))
        waiting.pop()
    return found
