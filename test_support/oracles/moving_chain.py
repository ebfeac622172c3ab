"""An exhaustive search over chains whose activations are kept, moved, or computed again.

The class of schedules is that of POFO (Beaumont, Eyraud-Dubois, Shilova, 2021): each activation is
kept, moved out and back, or computed again from the nearest one below that is not. What is computed
again follows Revolve: on the way up some activations stay for a while, and those below them are
computed again later. For short chains all choices are tried, so no dynamic program is needed. Each
is run by an event simulation of its own: it shares nothing with moves, liveness, simulator or
solvers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    end_ms = _forward_ms(layers, way, budget_bytes, link)
    if end_ms == math.inf:
        return math.inf
    backwards = _backwards(way, len(layers) - 1)
    least = min(_end_ms(layers, way, ops, end_ms, budget_bytes, link) for ops in backwards)
    return least - sum(layer.fwd_ms + layer.bwd_ms for layer in layers)


def _forward_ms(
    layers: Sequence[Layer], way: Sequence[str], budget_bytes: int, link: Link
) -> float:
    """Return when the forward has ended, and all copies out."""
    count = len(layers)
    sizes = [layer.size_bytes for layer in layers]
    now = link_free = 0.0
    held: dict[int, int] = {}
    done: dict[int, float] = {}  # when a copy out ends
    leaving: list[tuple[float, int]] = []  # when it is gone, and its bytes
    for k, layer in enumerate(layers):
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
    return max([now, *(end for end, _ in leaving)])


class _Op(NamedTuple):
    kind: str  # "F" or "B"
    layer: int
    drops: tuple[int, ...]  # what is computed again and goes when it has run


_Ops = tuple[_Op, ...]


def _backwards(way: Sequence[str], top: int) -> Iterator[_Ops]:
    """Yield all orders of the backward from a layer down, with what is computed again."""
    if top < 0:
        yield ()
        return
    first = top  # the lowest layer whose activation is computed again for the backward of `top`
    while first > 0 and way[first - 1] == "r":
        first -= 1
    parts = _again(first, top - 1) if first < top else [(_Op("B", top, ()),)]
    below = first if first < top else top - 1
    for part, rest in itertools.product(parts, list(_backwards(way, below))):
        yield (*part, *rest)


def _again(first: int, last: int) -> list[_Ops]:
    """Return all orders of the backwards that read these activations, which are computed again.

    One of them, `stop`, is made first and stays until its backward; those on the way go at once.
    """
    if first > last:
        return [()]
    found = []
    for stop in range(first, last + 1):
        way_up = tuple(_Op("F", k, (k - 1,) if k > first else ()) for k in range(first, stop + 1))
        read = _Op("B", stop + 1, (stop,))
        for above, below in itertools.product(_again(stop + 1, last), _again(first, stop - 1)):
            found.append((*way_up, *above, read, *below))
    return found


def _end_ms(
    layers: Sequence[Layer],
    way: Sequence[str],
    ops: _Ops,
    now: float,
    budget_bytes: int,
    link: Link,
) -> float:
    """Return when a backward that begins at `now` has ended; infinity if it does not fit."""
    sizes = [layer.size_bytes for layer in layers]
    last = len(layers) - 1
    held = {k: sizes[k] for k in range(last) if way[k] == "k"} | {last: sizes[last]}
    again: set[int] = set()
    following = [op.layer for op in ops if op.kind == "B"][::-1]
    room = []
    for op in ops:
        again |= {op.layer} if op.kind == "F" else set()
        gradient = layers[following[-1]].gradient_bytes
        own = sum(held.values()) + sum(sizes[k] for k in again)
        room.append(budget_bytes - own - gradient)
        again -= set(op.drops)
        if op.kind == "B":
            following.pop()
            held.pop(op.layer - 1, None)
    begins: dict[int, list[int]] = {}  # what comes in before an operation
    for k in range(last - 1, -1, -1):
        if way[k] != "m":
            continue
        reads = [t for t, op in enumerate(ops) if op.layer - 1 == k]
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
    for t, op in enumerate(ops):
        for k in begins.get(t, ()):
            link_free = max(link_free, now) + link.in_ms(sizes[k])
            there[k] = link_free
        layer = layers[op.layer]
        now = max(now, there.get(op.layer - 1, 0.0))
        now += layer.fwd_ms if op.kind == "F" else layer.bwd_ms
    return now
