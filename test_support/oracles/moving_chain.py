"""An exhaustive search over chains whose activations are kept, moved, or computed again.

The class of schedules is that of POFO (Beaumont, Eyraud-Dubois, Shilova, 2021) with one level of
recomputation: each activation is kept, moved out and back, or computed again from the nearest one
below that is not. For short chains all choices are tried, so no dynamic program is needed. Each is
run by an event simulation of its own: it shares nothing with moves, liveness, simulator or solvers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rockmate.problems.link import Link
from rockmate.problems.problem import Node, Problem, Storage


@dataclass(frozen=True)
class Layer:
    """A layer of a chain; its backward reads what the layer below has made."""

    fwd_ms: float
    bwd_ms: float
    size_bytes: int  # of what it makes
    gradient_bytes: int  # before its backward


def problem_of(layers: Sequence[Layer], link: Link) -> Problem:
    """Return the chain as a problem; the last layer makes the output."""
    last = len(layers) - 1
    nodes = tuple(
        Node(f"layer {k}", layer.fwd_ms, layer.bwd_ms, grads_before_bytes=layer.gradient_bytes)
        for k, layer in enumerate(layers)
    )
    storages = tuple(
        Storage(f"x{k}", layer.size_bytes, k, (k + 1,), (k + 1,), is_movable=True)
        for k, layer in enumerate(layers[:-1])
    )
    output = Storage("y", layers[-1].size_bytes, last, is_output=True)
    return Problem(nodes, (*storages, output), link)


def least_overhead_ms(layers: Sequence[Layer], budget_bytes: int, link: Link) -> float:
    """Return the least extra time of a step in this class; infinity if nothing fits."""
    ways = itertools.product("kmr", repeat=len(layers) - 1)
    return min(_overhead_ms(layers, way, budget_bytes, link) for way in ways)


def _overhead_ms(
    layers: Sequence[Layer], way: Sequence[str], budget_bytes: int, link: Link
) -> float:
    count = len(layers)
    sizes = [layer.size_bytes for layer in layers]
    now = link_free = 0.0
    held: dict[int, int] = {}
    done: dict[int, float] = {}  # when a copy out ends
    leaving: list[tuple[float, int]] = []  # when it is gone, and its bytes
    for k, layer in enumerate(layers):  # the forward
        own = [t for t in leaving if t[0] > now]
        while sum(held.values()) + sum(size for _, size in own) + sizes[k] > budget_bytes:
            if not own:
                return math.inf
            now = own.pop(0)[0]
        leaving = own
        now += layer.fwd_ms
        held[k] = sizes[k]
        if k > 0 and way[k - 1] != "k":
            size = held.pop(k - 1)
            if way[k - 1] == "m":  # its copy began when it was made
                leaving.append((done[k - 1], size))
        if k < count - 1 and way[k] == "m":
            link_free = max(link_free, now) + link.out_ms(sizes[k])
            done[k] = link_free
    now = max([now, *(end for end, _ in leaving)])

    ops: list[tuple[float, int, int]] = []  # of the backward: time, bytes without moved ones, reads
    computed: set[int] = set()
    for k in range(count - 1, -1, -1):
        gradient = layers[k].gradient_bytes
        if k and way[k - 1] == "r" and k - 1 not in computed:
            start = k - 1
            while start > 0 and way[start - 1] == "r":
                start -= 1
            for again in range(start, k):
                computed.add(again)
                bytes_now = sum(held.values()) + sum(sizes[i] for i in computed) + gradient
                ops.append((layers[again].fwd_ms, bytes_now, again - 1))
        bytes_now = sum(held.values()) + sum(sizes[i] for i in computed) + gradient
        ops.append((layers[k].bwd_ms, bytes_now, k - 1))
        held.pop(k - 1, None)
        computed.discard(k - 1)

    room = [budget_bytes - bytes_now for _, bytes_now, _ in ops]
    begins: dict[int, list[int]] = {}  # what comes in before an operation
    for k in range(count - 2, -1, -1):
        if way[k] != "m":
            continue
        reads = [t for t, (_, _, read) in enumerate(ops) if read == k]
        for t in range(reads[0], reads[-1] + 1):
            room[t] -= sizes[k]
        at = reads[0]
        while at > 0 and room[at - 1] >= sizes[k]:
            at -= 1
            room[at] -= sizes[k]
        begins.setdefault(at, []).append(k)
    if min(room) < 0:
        return math.inf
    link_free, there = 0.0, dict[int, float]()
    for t, (time_ms, _, read) in enumerate(ops):
        for k in begins.get(t, ()):
            link_free = max(link_free, now) + link.in_ms(sizes[k])
            there[k] = link_free
        now = max(now, there.get(read, 0.0)) + time_ms
    return now - sum(layer.fwd_ms + layer.bwd_ms for layer in layers)
