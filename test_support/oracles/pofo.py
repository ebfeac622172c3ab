"""POFO: a dynamic program for chains whose activations are kept, moved, or computed again.

Olivier Beaumont, Lionel Eyraud-Dubois, Alena Shilova: Efficient Combination of Rematerialization
and Offloading for Training DNNs (2021). A chain is cut into segments. What lies between two of them
is kept or moved; what lies inside of one is computed again from its start, by the best order of
Revolve's kind for the memory that is left. The backward is followed against time: what must come in
there leaves memory like what goes out in the forward. So one state, between two segments, says all
about both passes: what is kept, and what each direction of the link has still to carry.

Times are whole milliseconds, and the link carries whole bytes in each. Memory is held for a whole
activation until its copy has ended. Copies out run in the forward, those in in the backward, as
late as they may. A segment has the memory that is left when most waits beside it. So the simulator
is richer: there a copy in may begin earlier, and one out may end in the backward. Nothing is shared
with it, nor with planners.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from oracles.moving_chain import Layer

Waiting = tuple[tuple[int, int], ...]  # activations by number, and the bytes still to carry
Ops = tuple[tuple[str, int], ...]  # "F" or "B", and the layer


class Found(NamedTuple):
    """A schedule: its extra time, its steps, and where activations are away.

    For each that moves: the step after which it is gone, and the one before which it comes back.
    """

    extra_ms: float
    ops: Ops
    away: dict[int, tuple[int, int]]


class _Rest(NamedTuple):
    """What is best from a segment up: the backward's steps end with that segment."""

    extra_ms: float
    ops: Ops
    gone: dict[int, int]  # the step of the forward after which one is gone
    back: dict[int, int]  # the step of the backward before which one comes back


class Pofo:
    """The dynamic program for one chain and budget, and a link of so many bytes per millisecond."""

    def __init__(
        self, layers: Sequence[Layer], budget_bytes: int, out_rate: int, in_rate: int
    ) -> None:
        self._fwd = [int(layer.fwd_ms) for layer in layers]
        self._bwd = [int(layer.bwd_ms) for layer in layers]
        self._sizes = [layer.size_bytes for layer in layers]
        self._gradients = [layer.gradient_bytes for layer in layers]
        self._budget, self._out, self._in = budget_bytes, out_rate, in_rate
        self._count = len(layers)
        self._rest = functools.cache(self._rest_from)
        self._again = functools.cache(self._computed_again)

    def best(self) -> Found:
        """Return the best schedule; its extra time is infinite if none fits."""
        extra_ms, ops, gone, back = self._rest(0, 0, (), (), False)
        forward = tuple(("F", k) for k in range(self._count))
        return Found(
            extra_ms, (*forward, *ops), {k: (gone[k], self._count + back[k]) for k in gone}
        )

    def _rest_from(
        self, start: int, kept: int, going: Waiting, coming: Waiting, is_moved: bool
    ) -> _Rest:
        """Return the best from a layer up.

        `is_moved`: what it reads moves, and is the last in `going`; it is not yet in `coming`.
        """
        best = _Rest(math.inf, (), {}, {})
        own = self._sizes[start - 1] if is_moved else 0
        for end in range(start + 1, self._count + 1):
            way = self._forward(start, end, kept, going)
            if way is None:
                break
            for place in range(len(coming) + 1):  # those before it have come in behind the segment
                beside = coming[place:]
                room = self._budget - kept - own - sum(self._sizes[k] for k, _ in beside)
                again_ms, ops = self._again(start, end - 1, room - self._sizes[-1])
                if again_ms == math.inf:
                    continue
                wait_ms = self._ms(coming[:place], self._in)
                later = _carried(coming, (wait_ms + again_ms) * self._in)
                if is_moved:
                    later = (*later, (start - 1, own))
                spent_ms = way[0] + wait_ms + again_ms - sum(self._bwd[start:end])
                rest = self._above(end, kept, way[1], later)
                if spent_ms + rest.extra_ms < best.extra_ms:
                    here = [k for k, _ in beside] + [start - 1] * is_moved
                    best = _Rest(
                        spent_ms + rest.extra_ms,
                        (*rest.ops, *ops),
                        way[2] | rest.gone,
                        dict.fromkeys(here, len(rest.ops)) | rest.back,
                    )
        return best

    def _above(self, end: int, kept: int, going: Waiting, coming: Waiting) -> _Rest:
        """Return the best from the end of a segment up: what it has made is kept or moves."""
        if end == self._count:  # the link carries all, first out, then in
            wait_ms = self._ms(going, self._out) + self._ms(coming, self._in)
            gone = {k: end - 1 for k, _ in going}
            return _Rest(wait_ms, (), gone, {k: 0 for k, _ in coming})
        size = self._sizes[end - 1]
        stays = self._rest(end, kept + size, going, coming, False)
        moves = self._rest(end, kept, (*going, (end - 1, size)), coming, True)
        return min(stays, moves, key=lambda rest: rest.extra_ms)

    def _forward(
        self, start: int, end: int, kept: int, going: Waiting
    ) -> tuple[int, Waiting, dict[int, int]] | None:
        """Return how long the forward waits, what still goes then, and when others are gone."""
        waited_ms, gone = 0, dict[int, int]()
        for k in range(start, end):
            read = self._sizes[k - 1] if k > start else 0
            while kept + read + self._sizes[k] + self._held(going) > self._budget:
                if not going or going[0][0] == start - 1 == k - 1:
                    return None
                wait_ms = self._ms(going[:1], self._out)
                gone[going[0][0]] = k - 1
                waited_ms, going = waited_ms + wait_ms, going[1:]
            left = _carried(going, self._fwd[k] * self._out)
            gone |= {a: k for a, _ in going[: len(going) - len(left)]}
            going = left
        return waited_ms, going, gone

    def _computed_again(self, first: int, last: int, room: int) -> tuple[float, Ops]:
        """Return the least time of the backwards of these layers, and the steps.

        What the first one reads is there; what the others read is computed again: one activation
        is made and stays, those above and then those below are done in the same way.
        """
        gradient = self._gradients[last]
        if first == last:
            fits = gradient <= room
            return (self._bwd[last], (("B", last),)) if fits else (math.inf, ())
        best: tuple[float, Ops] = (math.inf, ())
        for stop in range(first, last):
            read = self._sizes[stop - 1] if stop > first else 0
            if gradient + read + self._sizes[stop] > room:
                break
            up = self._again(stop + 1, last, room - self._sizes[stop])
            down = self._again(first, stop, room)
            taken_ms = sum(self._fwd[first : stop + 1]) + up[0] + down[0]
            if taken_ms < best[0]:
                way = tuple(("F", k) for k in range(first, stop + 1))
                best = (taken_ms, (*way, *up[1], *down[1]))
        return best

    def _held(self, waiting: Waiting) -> int:
        return sum(self._sizes[k] for k, _ in waiting)

    def _ms(self, waiting: Waiting, rate: int) -> int:
        size_bytes = sum(left for _, left in waiting)
        assert size_bytes % rate == 0
        return size_bytes // rate


def _carried(waiting: Waiting, size_bytes: float) -> Waiting:
    """Return what still waits when the link has carried so many bytes of it, the first first."""
    for place, (k, left) in enumerate(waiting):
        if left > size_bytes:
            return ((k, int(left - size_bytes)), *waiting[place + 1 :])
        size_bytes -= left
    return ()
