"""The places of a backward at which gradients are handed over, equal for every kind of backward.

The forward decides which autograd nodes lead to leaves. The kind of backward only decides which of
these nodes run. So places are groups of these edges; gradients that a kind does not give are None.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rkgb.device.chosen import device_of
from rkgb.elements.target import GradientCut
from rkgb.graphs.simplified import SimplifiedGraph

Step = tuple[Literal["F", "B"], int]
Places = tuple[tuple[int, ...], ...]  # of edges, by their numbers in the recording

# Gradients of more than this many bytes are handed over even if there is headroom, because an
# optimizer or other processes may be waiting for them.
_MOST_WAITING_BYTES = 1 << 18


def first_forwards(steps: Sequence[Step]) -> list[bool]:
    """Return for each step whether it is the first forward of its node."""
    seen: set[int] = set()
    found = []
    for kind, node in steps:
        found.append(kind == "F" and node not in seen)
        seen.add(node)
    return found


@dataclass(frozen=True)
class Given:
    """A part of a gradient, and the step of a plan that makes it."""

    step: int
    edge: int
    leaf: str
    value: str


def given_by(sg: SimplifiedGraph, steps: Sequence[Step]) -> list[Given]:
    """Return the parts of gradients that the steps of a plan make, in order."""
    numbers: dict[tuple[str, int], deque[int]] = defaultdict(deque)
    for edge, key in enumerate(sg.basic.edges):
        numbers[key].append(edge)
    return [
        Given(t, numbers[h.leaf, h.sequence_nr].popleft(), h.leaf, h.value)
        for t, (kind, index) in enumerate(steps)
        if kind == "B"
        for h in sg.nodes[index].hand_overs
    ]


def waiting_places(
    sg: SimplifiedGraph, steps: Sequence[Step], spare_bytes: Sequence[int] = ()
) -> Places:
    """Return a place for each backward, or one for several if there is headroom to wait.

    `spare_bytes` is the headroom of each step. Gradients of leaves wait within it for later ones,
    because a hand-over costs as much as a small operation. Edges whose gradients these steps do not
    make get separate places, because their size is not known.
    """
    parts: dict[int, list[Given]] = {}
    for given in given_by(sg, steps):
        parts.setdefault(given.step, []).append(given)
    found: list[list[Given]] = []
    waiting: list[Given] = []
    room = 0
    known: set[str] = set()  # leaves with a part of their gradient in autograd
    for t in range(len(steps)):
        room = min(room, spare_bytes[t]) if spare_bytes else -1
        kind, index = steps[t]
        if kind == "B" and any(
            isinstance(op.target, GradientCut) for op in sg.nodes[index].backward
        ):
            room = -1  # earlier gradients are handed over before an output's
        if t not in parts:
            continue
        if waiting and _bytes(sg, waiting, known) <= min(room, _MOST_WAITING_BYTES):
            found.pop()
            waiting = [*waiting, *parts[t]]
        else:
            known.update(given.leaf for given in waiting)
            waiting = parts[t]
        found.append(waiting)
        room = _MOST_WAITING_BYTES
    places = [tuple(sorted(given.edge for given in part)) for part in found]
    rest = set(range(len(sg.basic.edges))).difference(*places)
    for edge in sorted(rest):
        later = (i for i, place in enumerate(places) if min(place) > edge)
        places.insert(next(later, len(places)), (edge,))
    return tuple(places)


def single_places(
    sg: SimplifiedGraph, steps: Sequence[Step], spare_bytes: Sequence[int] = ()
) -> Places:
    """Return a place for each edge, in eager's order as far as the headroom allows waiting."""
    places = tuple((edge,) for edge in range(len(sg.basic.edges)))
    held = held_bytes(sg, steps, places)
    if all(more <= spare for more, spare in zip(held, spare_bytes or [0] * len(held), strict=True)):
        return places
    return tuple((e,) for place in waiting_places(sg, steps) for e in place)


def ends_of(given: Sequence[Given], places: Places) -> list[int]:
    """Return for each place the step after which it and all earlier places are complete."""
    made = {part.edge: part.step for part in given}
    ends: list[int] = []
    end = min(made.values(), default=0)
    for place in places:
        end = max([end, *(made[edge] for edge in place if edge in made)])
        ends.append(end)
    return ends


def held_bytes(sg: SimplifiedGraph, steps: Sequence[Step], places: Places) -> list[int]:
    """Return for each step the bytes of waiting gradients, which separate hand-overs would free."""
    given = given_by(sg, steps)
    end_of = {
        edge: end
        for place, end in zip(places, ends_of(given, places), strict=True)
        for edge in place
    }
    held = [0] * len(steps)
    for part in given:
        for t in range(part.step + 1, end_of[part.edge] + 1):
            held[t] += _bytes(sg, [part], set())
    return held


def _bytes(sg: SimplifiedGraph, waiting: Sequence[Given], known: set[str]) -> int:
    """Return the bytes of waiting gradients; sums in autograd also wait for their last part."""
    infos = sg.infos
    roots = {infos[part.value].alias_of for part in waiting}
    sums = {infos[part.leaf].alias_of for part in waiting if part.leaf in known}
    block_bytes = device_of(sg.basic.device).block_bytes
    return sum(block_bytes(infos[root].counted_bytes) for root in (*roots, *sums))
