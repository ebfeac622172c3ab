"""A graph of operations as rockmate's `Problem`, exactly.

Operations of the head become forwards. Each other one, which runs once, becomes the backward of a
node. Backwards run in the reverse order of their nodes, and read only what was made up to their
node; so an operation gets the node of the last result of the head that it, or an operation after
it, reads. Where that node has a backward already, a node that computes nothing is put behind it.
What operations of the tail leave for each other depends on no plan: it is counted as gradients are.

A lower bound on the problem is thus one for all schedules that run the head once as it stands, then
the tail in its order, with any operations of the head again between those of the tail.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from public_graphs.graph import OperationGraph
from rockmate.planning import Node, Problem, Step, Storage

_TOTAL_MS = 1000.0  # of the step without recomputation, whatever the unit of the file


@dataclass(frozen=True)
class Encoding:
    """A problem, and which operation each of its steps runs."""

    problem: Problem
    forwards: tuple[int | None, ...]  # by node; None: nothing is computed
    backwards: tuple[int | None, ...]

    def sequence(self, steps: Iterable[Step]) -> list[int]:
        """Return the operations that steps of the problem run, in their order."""
        ran = ((self.forwards if kind == "F" else self.backwards)[node] for kind, node in steps)
        return [operation for operation in ran if operation is not None]


def encode(graph: OperationGraph) -> Encoding:
    """Return a graph as a problem."""
    operations, head = graph.operations, graph.head
    forwards, backwards = _nodes(graph)
    node_of = {operation: node for node, operation in enumerate(forwards) if operation is not None}
    back_of = {operation: node for node, operation in enumerate(backwards) if operation is not None}
    held = _held_before(graph)
    scale = _TOTAL_MS / max(1, graph.time)
    nodes = []
    for first, second in zip(forwards, backwards, strict=True):
        made = operations[first] if first is not None else None
        back = operations[second] if second is not None else None
        named = made or back
        assert named is not None
        nodes.append(
            Node(
                name=named.name,
                fwd_time_ms=made.time * scale if made else 0.0,
                bwd_time_ms=back.time * scale if back else 0.0,
                has_backward=back is not None,
                bwd_peak_bytes=sum(result.size_bytes for result in back.results) if back else 0,
                grads_before_bytes=held[second] if second is not None else 0,
            )
        )
    readers = _readers(graph)
    storages = tuple(
        Storage(
            operations[made].name,
            operations[made].results[which].size_bytes,
            node_of[made],
            fwd_users=tuple(node_of[place] for place in places if place < head),
            bwd_users=tuple(sorted(back_of[place] for place in places if place >= head)),
            is_output=operations[made].results[which].is_kept,
        )
        for (made, which), places in readers.items()
        if made < head
    )
    return Encoding(Problem(tuple(nodes), storages), tuple(forwards), tuple(backwards))


def _nodes(graph: OperationGraph) -> tuple[list[int | None], list[int | None]]:
    """Return the operation of each node's forward, and the one of its backward."""
    forwards: list[int | None] = []
    backwards: list[int | None] = []
    for place in range(len(graph.operations) - 1, graph.head - 1, -1):
        needed = max((r for r, _ in graph.operations[place].reads if r < graph.head), default=-1)
        made = sum(forward is not None for forward in forwards)
        while made <= needed:
            forwards.append(made)
            backwards.append(None)
            made += 1
        if not forwards or backwards[-1] is not None:
            forwards.append(None)
            backwards.append(None)
        backwards[-1] = place
    for unread in range(sum(forward is not None for forward in forwards), graph.head):
        forwards.append(unread)
        backwards.append(None)
    return forwards, backwards


def _readers(graph: OperationGraph) -> dict[tuple[int, int], list[int]]:
    """Return the operations that read each result."""
    readers: dict[tuple[int, int], list[int]] = {
        (place, which): []
        for place, operation in enumerate(graph.operations)
        for which in range(len(operation.results))
    }
    for place, operation in enumerate(graph.operations):
        for read in dict.fromkeys(operation.reads):
            readers[read].append(place)
    return readers


def _held_before(graph: OperationGraph) -> list[int]:
    """Return the bytes that operations of the tail hold for later ones, before each operation."""
    end = len(graph.operations)
    change = [0] * (end + 2)
    for (place, which), places in _readers(graph).items():
        if place >= graph.head:
            result = graph.operations[place].results[which]
            last = end if result.is_kept else max(places, default=place)
            change[place + 1] += result.size_bytes
            change[last + 1] -= result.size_bytes
    return list(itertools.accumulate(change))
