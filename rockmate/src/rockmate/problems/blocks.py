"""Cuts of a problem, the blocks between them, and classes of equal blocks.

A cut after node c is an articulation point: of the storages made before it, forward and backward
after it read at most one. A block between two cuts is then a separate problem. Outputs and *pinned*
storages do not count. Outputs are alive anyway; pinned storages are kept throughout (masks,
positions, an encoder's result that every decoder layer reads). Their bytes are subtracted from the
budget.
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
    """Return sets of long-lived storages that are worth pinning, the empty set first.

    A set consists of the storages whose readers span at least some number of nodes and whose bytes
    are within the limit. It is returned if pinning it gives more cuts than smaller sets.
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
    """Nodes `first` to `end` (exclusive) as a separate problem.

    `local` has an additional last node, the end of the forward. It costs nothing and reads the
    block's result, so the storages alive at this node are those that the block saves from forward
    to backward. Inputs of the block are resident in `local`. Outputs and pinned storages have no
    bytes there, because they are subtracted from the whole budget. Nor do gradients that wait
    throughout the block's backward, such as those of each layer's cache in a language model: by
    them alone, equal layers would differ.
    """

    first: int
    end: int
    local: Problem
    boundary_bytes: int  # of the block's result
    waiting_bytes: int  # of gradients that wait throughout the block's backward
    class_id: int

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for blocks of equal structure and bytes; names and times do not count."""
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
        local, boundary, waiting = _local_problem(problem, first, end, pinned)
        class_id = ids.setdefault(_signature(local), len(ids))
        blocks.append(Block(first, end, local, boundary, waiting, class_id))
    members: dict[int, list[Block]] = {}
    for block in blocks:
        members.setdefault(block.class_id, []).append(block)
    averaged = {key: _average_times([b.local for b in group]) for key, group in members.items()}
    return tuple(dataclasses.replace(b, local=averaged[b.class_id]) for b in blocks)


def reserved_bytes(problem: Problem, pinned: frozenset[int] = frozenset()) -> int:
    """Return the bytes outside of blocks: outputs, pinned storages and rerun states."""
    kept = sum(
        storage.size_bytes
        for index, storage in enumerate(problem.storages)
        if storage.is_output or index in pinned
    )
    return kept + sum(node.rerun_state_bytes for node in problem.nodes)


def merge_repeated(blocks: Sequence[Block], max_nodes: int) -> list[int]:
    """Return fewer cuts, by repeatedly merging the most frequent pair of neighbouring blocks.

    Merging repeated pairs keeps the number of classes small. It stops if no pair fits `max_nodes`.
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
) -> tuple[Problem, int, int]:
    own = problem.nodes[first:end]
    waiting = min((node.grads_before_bytes for node in own if node.has_backward), default=0)
    nodes = [
        dataclasses.replace(
            node,
            rerun_state_bytes=0,
            grads_before_bytes=node.grads_before_bytes - waiting if node.has_backward else 0,
        )
        for node in own
    ]
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
    return Problem(tuple(nodes), tuple(storages)), boundary, waiting


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
