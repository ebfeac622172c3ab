"""When storages move: between which steps each copy is under way, as memory allows."""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rockmate.problems.link import Link
from rockmate.problems.problem import Problem
from rockmate.schedules.moves import Move, Moves, copied_out, uses_of_copies
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Steps


def moves_for(
    problem: Problem, steps: Steps, arrivals: Mapping[int, Sequence[int]], budget_bytes: int
) -> Iterator[Moves]:
    """Yield moves for storages that arrive before some steps, if they fit: few of them, then all.

    Copies out end as late, and copies in start as early, as memory allows, but no further than they
    need for computing not to wait. Few: what may stay, stays. Then it takes memory that copies in
    flight may need.
    """
    link = problem.link
    assert link is not None
    copies = uses_of_copies(problem, steps)
    least: list[Move] = []  # elsewhere for as long as possible
    for index, places in arrivals.items():
        gaps: dict[tuple[int, int], int] = {}  # between two uses, and where the copy is made
        for place in sorted(places):
            uses = next((u for u in reversed(copies[index]) if u[0] < place), [])
            at = bisect_left(uses, place)
            if 0 < at < len(uses) and uses[at] - uses[at - 1] > 1:
                gaps[uses[at - 1], uses[at]] = uses[0]
        made = -1
        for (before, behind), start in gaps.items():  # what has been copied only leaves
            least.append(Move(index, start if start != made else before, before, behind))
            made = start
    least = _in_order(least)
    peaks = simulate(problem, steps, least).peak_during
    if max(peaks, default=0) > budget_bytes:
        return
    begins = begins_of(problem.time_ms(*step) for step in steps)  # of each step, if nothing waits
    fewest = len(least)
    for few in (True, False):
        during = list(peaks)
        chosen = _needed(problem, least, during, budget_bytes) if few else least
        if few or len(chosen) > fewest:
            fewest = len(chosen)
            timed = _Copies(problem, link, steps, begins, during, budget_bytes)
            yield tuple(timed.starting_earlier(timed.ending_later(chosen)))


def begins_of(times: Iterable[float]) -> list[float]:
    """Return when each of some steps begins, one after the other; then when the last one ends."""
    return list(itertools.accumulate(times, initial=0.0))


def _in_order(moves: Sequence[Move]) -> list[Move]:
    return sorted(moves, key=lambda m: (m.out_after, m.gone_after, m.storage))


def _needed(
    problem: Problem, moves: Sequence[Move], during: list[int], budget_bytes: int
) -> list[Move]:
    """Return the moves without those of storages that may as well stay, the largest first."""
    by_storage: dict[int, list[Move]] = {}
    for move in moves:
        by_storage.setdefault(move.storage, []).append(move)
    for index in sorted(by_storage, key=lambda i: (-problem.sizes[i], i)):
        size = problem.sizes[index]
        away = [t for m in by_storage[index] for t in range(m.gone_after + 1, m.back_before)]
        if all(during[t] + size <= budget_bytes for t in away):
            for t in away:
                during[t] += size
            del by_storage[index]
    return [move for move in moves if move.storage in by_storage]


@dataclasses.dataclass(frozen=True)
class _Copies:
    """The copies of some moves, and the memory during each step, which grows with them."""

    problem: Problem
    link: Link
    steps: Steps
    begins: Sequence[float]
    during: list[int]
    budget_bytes: int

    def ending_later(self, moves: Sequence[Move]) -> list[Move]:
        """Return the moves with ends of copies out so late that nothing waits, where that fits."""
        found: list[Move] = []
        free_ms = 0.0  # when the link is free
        copied = copied_out(self.problem, self.steps, moves)
        for move in moves:
            size, gone = self.problem.sizes[move.storage], move.gone_after
            if move in copied:
                free_ms = max(free_ms, self.begins[move.out_after + 1]) + self.link.out_ms(size)
                while gone + 1 < move.back_before - 1 and self.begins[gone + 1] < free_ms:
                    if not self._takes(size, gone + 1):
                        break
                    gone += 1
            found.append(dataclasses.replace(move, gone_after=gone))
        return found

    def starting_earlier(self, moves: Sequence[Move]) -> list[Move]:
        """Return the moves with copies in that start early enough not to wait, where that fits."""
        found: list[Move] = []
        starts: dict[Move, float] = {}  # the latest start after which nothing waits
        latest = float("inf")
        for move in sorted(moves, key=lambda m: -m.back_before):
            in_ms = self.link.in_ms(self.problem.sizes[move.storage])
            latest = min(latest, self.begins[move.back_before]) - in_ms
            starts[move] = latest
        for move in sorted(moves, key=lambda m: m.back_before):
            size, back = self.problem.sizes[move.storage], move.back_before
            while back - 1 > move.gone_after and self.begins[back] > starts[move]:
                if not self._takes(size, back - 1):
                    break
                back -= 1
            if back - 1 > move.gone_after:
                found.append(dataclasses.replace(move, back_before=back))
        return _in_order(found)

    def _takes(self, size_bytes: int, step: int) -> bool:
        """Let a storage be there during one more step, and return True, if it fits."""
        if self.during[step] + size_bytes > self.budget_bytes:
            return False
        self.during[step] += size_bytes
        return True
