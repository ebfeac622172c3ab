"""Orders of directed graphs given as 'node -> the nodes it depends on'."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter


def topological_order(deps: Mapping[int, Sequence[int]], rank: Mapping[int, int]) -> list[int]:
    """Return the nodes so that each follows its dependencies; among equals the smaller rank first.

    Raises:
        ValueError: the graph has a cycle.
    """
    sorter = TopologicalSorter(deps)
    sorter.prepare()
    ready: list[tuple[int, int]] = []
    order: list[int] = []
    while sorter.is_active():
        for node in sorter.get_ready():
            heapq.heappush(ready, (rank[node], node))
        order.append(heapq.heappop(ready)[1])
        sorter.done(order[-1])
    return order


def strongly_connected(deps: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Return the strongly connected components (Tarjan 1972, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    components: list[list[int]] = []
    for root in deps:
        if root in index:
            continue
        work = [(root, iter(deps[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, sources = work[-1]
            for source in sources:
                if source not in index:
                    index[source] = low[source] = len(index)
                    stack.append(source)
                    on_stack.add(source)
                    work.append((source, iter(deps[source])))
                    break
                if source in on_stack:
                    low[node] = min(low[node], index[source])
            else:
                work.pop()
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.append(member)
                        if member == node:
                            break
                    components.append(sorted(component))
    return components
