"""Cuts of a problem, the blocks between them, and classes of equal blocks.

A cut after node c is an articulation point: of what is made before it, the forward after it reads
one storage at most, and the backward after it reads nothing else. A block between two cuts is then
a problem of its own. Outputs and *pinned* storages do not count: they are alive anyway (outputs) or
are kept all the time by decision (masks, positions, an encoder's memory that every decoder layer
reads), and their bytes are taken off the budget.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rockmate.problems.problem import Node, Problem, Storage


def find_cuts(problem: Problem, pinned: frozenset[int] = frozenset()) -> list[int]:
    """Return the nodes after which the problem can be cut, in order."""
    count = len(problem.nodes)
    forward_span = [0] * (count + 1)  # differences of the number of storages read across each cut
    backward_only = [0] * (count + 1)  # of those that only a backward reads across it
    for index, storage in enumerate(problem.storages):
        if storage.is_output or index in pinned:
            continue
        first = storage.producer
        last = max(storage.fwd_users, default=first)
        last_backward = max(storage.bwd_users, default=first)
        forward_span[first] += 1
        forward_span[last] -= 1
        if last_backward > last:
            backward_only[last] += 1
            backward_only[last_backward] -= 1
    cuts = []
    crossing = hidden = 0
    for c in range(count - 1):
        crossing += forward_span[c]
        hidden += backward_only[c]
        if crossing <= 1 and hidden == 0:
            cuts.append(c)
    return cuts


def largest_block(problem: Problem, pinned: frozenset[int] = frozenset()) -> int:
    """Return the number of nodes of the largest block between two cuts."""
    borders = [0, *(c + 1 for c in find_cuts(problem, pinned)), len(problem.nodes)]
    return max(end - first for first, end in itertools.pairwise(borders))


def pinned_candidates(problem: Problem, limit_bytes: int) -> list[frozenset[int]]:
    """Return sets of long-lived storages that are worth keeping all the time, the empty set first.

    Each set holds the storages whose readers span at least some number of nodes and whose bytes
    are within the limit; a set is returned where pinning it gives more cuts than smaller sets.
    """
    count = len(problem.nodes)
    span = {}
    for index, storage in enumerate(problem.storages):
        users = storage.fwd_users + storage.bwd_users
        if not storage.is_output and not storage.is_phantom and users:
            span[index] = max(users) - storage.producer
    found = [frozenset[int]()]
    most = len(find_cuts(problem))
    for length in (count // 2, count // 4, count // 8, 60, 30, 16):
        chosen = frozenset(index for index, s in span.items() if s >= max(8, length))
        if not chosen or sum(problem.sizes[i] for i in chosen) > limit_bytes:
            continue
        cuts = len(find_cuts(problem, chosen))
        if cuts > 1.25 * most + 1:
            found.append(chosen)
            most = cuts
    return found


@dataclass(frozen=True)
class Block:
    """Nodes `first` to `end` (exclusive) as a problem of their own.

    `local` has one more node than the block: the last, which stands for the end of the forward. It
    costs nothing and reads what the block hands on, so whatever is alive while it runs is what the
    block saves from forward to backward. What comes from outside is resident there; outputs and
    pinned storages weigh nothing there, because they are taken off the budget as a whole.
    """

    first: int
    end: int
    local: Problem
    boundary_bytes: int  # what the block hands on to the next
    class_id: int

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for blocks of equal structure and bytes; names and times are left out."""
        return _signature(self.local)


def make_blocks(
    problem: Problem, cuts: Sequence[int], pinned: frozenset[int] = frozenset()
) -> tuple[Block, ...]:
    """Return the blocks between the cuts; equal blocks share a class id and average times."""
    starts = [0, *(c + 1 for c in cuts)]
    ends = [*(c + 1 for c in cuts), len(problem.nodes)]
    ids: dict[tuple[object, ...], int] = {}
    blocks = []
    for first, end in zip(starts, ends, strict=True):
        local, boundary = _local_problem(problem, first, end, pinned)
        class_id = ids.setdefault(_signature(local), len(ids))
        blocks.append(Block(first, end, local, boundary, class_id))
    members: dict[int, list[Block]] = {}
    for block in blocks:
        members.setdefault(block.class_id, []).append(block)
    averaged = {key: _average_times([b.local for b in group]) for key, group in members.items()}
    return tuple(dataclasses.replace(b, local=averaged[b.class_id]) for b in blocks)


def reserved_bytes(problem: Problem, pinned: frozenset[int] = frozenset()) -> int:
    """Return what blocks do not account for: outputs, pinned storages and rerun states."""
    kept = sum(
        storage.size_bytes
        for index, storage in enumerate(problem.storages)
        if storage.is_output or index in pinned
    )
    return kept + sum(node.rerun_state_bytes for node in problem.nodes)


def merge_repeated(blocks: Sequence[Block], max_nodes: int) -> list[int]:
    """Return fewer cuts: the most frequent pairs of neighbouring blocks become one, repeatedly.

    Merging what repeats keeps the number of classes small. Stops when no pair fits `max_nodes`.
    """
    parts: list[tuple[int, int, int]] = [(b.class_id, b.first, b.end) for b in blocks]
    fresh = max((part[0] for part in parts), default=0) + 1
    while True:
        count: dict[tuple[int, int], int] = {}
        size: dict[tuple[int, int], int] = {}
        for left, right in itertools.pairwise(parts):
            if right[2] - left[1] <= max_nodes:
                pair = left[0], right[0]
                count[pair] = count.get(pair, 0) + 1
                size[pair] = right[2] - left[1]
        if not count:
            break
        pair = min(count, key=lambda p: (-count[p], size[p], p))
        merged: list[tuple[int, int, int]] = []
        for part in parts:
            if merged and (merged[-1][0], part[0]) == pair and part[2] - merged[-1][1] <= max_nodes:
                merged[-1] = (fresh, merged[-1][1], part[2])
            else:
                merged.append(part)
        parts = merged
        fresh += 1
    return [part[2] - 1 for part in parts[:-1]]


def _local_problem(
    problem: Problem, first: int, end: int, pinned: frozenset[int]
) -> tuple[Problem, int]:
    nodes = [dataclasses.replace(node, rerun_state_bytes=0) for node in problem.nodes[first:end]]
    closing = end - first
    nodes.append(Node("end of forward", 0.0, has_backward=False))
    storages = []
    boundary = 0
    for k in range(first, end):
        for index in problem.products[k]:
            storage = problem.storages[index]
            free = storage.is_output or index in pinned
            handed_on = any(u >= end for u in storage.fwd_users)
            users = [u - first for u in storage.fwd_users if u < end]
            if handed_on and not free:
                users.append(closing)
                boundary += storage.size_bytes
            storages.append(
                Storage(
                    name=storage.name,
                    size_bytes=0 if free else storage.size_bytes,
                    producer=storage.producer - first,
                    fwd_users=tuple(users),
                    bwd_users=tuple(u - first for u in storage.bwd_users if u < end),
                    is_phantom=storage.is_phantom,
                    is_output=free,
                )
            )
    return Problem(tuple(nodes), tuple(storages)), boundary


def _signature(local: Problem) -> tuple[object, ...]:
    nodes = tuple(
        (
            node.has_backward,
            node.fwd_peak_bytes,
            node.fwd_peak_nograd_bytes,
            node.bwd_peak_bytes,
            node.grads_before_bytes,
        )
        for node in local.nodes
    )
    storages = tuple(
        (s.size_bytes, s.producer, s.fwd_users, s.bwd_users, s.is_phantom, s.is_output)
        for s in local.storages
    )
    return nodes, storages


def _average_times(group: Sequence[Problem]) -> Problem:
    count = len(group)
    nodes = tuple(
        dataclasses.replace(
            node,
            fwd_time_ms=sum(local.nodes[k].fwd_time_ms for local in group) / count,
            bwd_time_ms=sum(local.nodes[k].bwd_time_ms for local in group) / count,
        )
        for k, node in enumerate(group[0].nodes)
    )
    return dataclasses.replace(group[0], nodes=nodes)
