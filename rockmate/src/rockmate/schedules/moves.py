"""Moves: copies of storages to other memory and back, beside the steps of a plan.

A move is a matter of order alone. It begins at the end of one step; its memory is free from the end
of a later step, however long the copy takes; and it is taken again just before a still later step.
The runtime waits for copies wherever this order needs it. So a slow link costs time and never
bytes: the peak follows from the steps and the moves, the time also from the link.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rockmate.errors import InvalidPlanError
from rockmate.problems.link import Link
from rockmate.problems.problem import Problem
from rockmate.schedules.steps import Step


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """One storage that is elsewhere between two steps; all indices are of steps.

    The copy out starts at the end of step `out_after`. At the end of step `gone_after` it is done
    and the memory is free. Just before step `back_before` the memory is taken again, and the copy
    in starts. The first step from there that reads the storage waits for it. Of several moves of a
    storage only the first one copies out, because the content does not change.
    """

    storage: int
    out_after: int
    gone_after: int
    back_before: int

    def __str__(self) -> str:
        """Return `3:5-9-40` for storage 3, out after 5, gone after 9, back before 40."""
        return f"{self.storage}:{self.out_after}-{self.gone_after}-{self.back_before}"

    @classmethod
    def of_text(cls, word: str) -> Move:
        """Read what `str` wrote."""
        storage, _, places = word.partition(":")
        numbers = [storage, *places.split("-")]
        if len(numbers) != 4 or not all(n.isdigit() for n in numbers):
            raise ValueError(f"{word!r} is no move; expected STORAGE:OUT-GONE-BACK in numbers")
        return cls(*map(int, numbers))


Moves = tuple[Move, ...]


def uses_of_copies(problem: Problem, steps: Sequence[Step]) -> list[list[list[int]]]:
    """Return for each storage its copies, each as the steps that make and read it, in order."""
    found: list[list[list[int]]] = [[] for _ in problem.storages]
    for t, (kind, node) in enumerate(steps):
        for index in problem.reads(kind, node):
            if found[index]:
                found[index][-1].append(t)
        if kind == "F":
            for index in problem.products[node]:
                if not (found[index] and problem.storages[index].is_output):
                    found[index].append([t])
    return found


def check_moves(problem: Problem, steps: Sequence[Step], moves: Sequence[Move]) -> None:
    """Refuse moves of what may not be moved, or of what is used while it is elsewhere.

    Raises:
        InvalidPlanError: names the first move that is wrong, and why.
    """
    copies = uses_of_copies(problem, steps) if moves else []
    there: dict[tuple[int, int], Move] = {}
    host: dict[int, int] = {}
    for move in moves:
        if not 0 <= move.storage < len(problem.storages):
            raise InvalidPlanError(
                f"a move of the plan names storage {move.storage}: there is none"
            )
        storage = problem.storages[move.storage]

        def wrong(why: str, move: Move = move, name: str = storage.name) -> InvalidPlanError:
            return InvalidPlanError(f"the move {move} of '{name}' {why}")

        if not storage.is_movable:
            raise wrong("is of a storage that may not be moved")
        if not 0 <= move.out_after <= move.gone_after < move.back_before < len(steps):
            raise wrong("must go out, be gone and come back in this order, within the plan")
        rows = copies[move.storage]
        at = move.gone_after
        copy = next((i for i, uses in enumerate(rows) if uses[0] <= at <= uses[-1]), -1)
        if copy < 0:
            raise wrong("takes away what is not there")
        uses = rows[copy]
        if not uses[0] <= move.out_after:
            raise wrong(f"starts before step {uses[0]} has made it")
        if move.back_before > uses[-1]:
            raise wrong("brings back what nothing reads")
        if any(move.gone_after < use < move.back_before for use in uses):
            raise wrong("takes away what a step reads meanwhile")
        before = there.get((move.storage, copy))
        if before is not None and move.out_after < before.back_before:
            raise wrong("begins before an earlier move of it has ended")
        there[move.storage, copy] = move
        if problem.link is not None:
            host[move.storage] = problem.link.host_taken(storage.size_bytes)
    if problem.link is not None and problem.link.host_bytes is not None:
        if sum(host.values()) > problem.link.host_bytes:
            raise InvalidPlanError(
                f"the moves of the plan take {sum(host.values())} bytes elsewhere, and "
                f"{problem.link.host_bytes} are allowed"
            )
    elif moves and problem.link is None:
        raise InvalidPlanError("the plan moves storages, and the problem has no link")


def copied_out(problem: Problem, steps: Sequence[Step], moves: Sequence[Move]) -> set[Move]:
    """Return the moves that copy out: the first of each copy of a storage."""
    copies = uses_of_copies(problem, steps)
    found: dict[tuple[int, int], Move] = {}
    for move in sorted(moves, key=lambda m: m.out_after):
        made = [uses[0] for uses in copies[move.storage] if uses[0] <= move.out_after]
        found.setdefault((move.storage, max(made, default=-1)), move)
    return set(found.values())


def moves_among(moves: Sequence[Move], kept: Sequence[int]) -> Moves:
    """Return the moves of a plan of which only the steps at these places are kept."""
    found = []
    for move in moves:
        out, gone = (bisect_right(kept, t) - 1 for t in (move.out_after, move.gone_after))
        back = bisect_left(kept, move.back_before)
        if 0 <= gone < back < len(kept):
            found.append(Move(move.storage, out, gone, back))
    return tuple(found)


def first_read(problem: Problem, steps: Sequence[Step], move: Move) -> int:
    """Return the first step that reads what a move has brought back; it waits for it."""
    for t in range(move.back_before, len(steps)):
        if move.storage in problem.reads(*steps[t]):
            return t
    return len(steps)


class Comings(NamedTuple):
    """What moves do at each step: sets of storages (bit masks)."""

    away: list[int]  # after each step: elsewhere, without memory here
    back: list[int]  # before each step: their memory is taken again


def comings_of(count: int, moves: Sequence[Move]) -> Comings:
    """Return where storages go and come in a plan of `count` steps."""
    change = [0] * (count + 1)
    back = [0] * count
    for move in moves:
        bit = 1 << move.storage
        back[move.back_before] |= bit
        if move.back_before - 1 > move.gone_after:
            change[move.gone_after] ^= bit
            change[move.back_before - 1] ^= bit
    away, now = [], 0
    for t in range(count):
        now ^= change[t]
        away.append(now)
    return Comings(away, back)


@dataclass(frozen=True, slots=True)
class Clocks:
    """The three clocks of a step with moves: when it computes, and when the link is busy."""

    total_ms: float
    stall_ms: float  # computing waits for copies
    stalls: tuple[tuple[int, float], ...]  # steps at which it waits, and how long
    out_ms: float  # the link is busy outwards
    in_ms: float
    begins_ms: tuple[float, ...]  # when each step begins


def clocks_of(problem: Problem, steps: Sequence[Step], moves: Sequence[Move], link: Link) -> Clocks:
    """Return the times of a step whose copies run beside computation, in the runtime's order.

    Copies of one direction run one after the other, in the order of the plan; of those that come in
    before one step, what is read first comes first. On a shared link all do.
    """
    outs: dict[int, list[Move]] = {}
    gone: dict[int, list[Move]] = {}
    back: dict[int, list[Move]] = {}
    copied = copied_out(problem, steps, moves)
    for move in sorted(moves, key=lambda m: (m.out_after, m.gone_after)):
        if move in copied:
            outs.setdefault(move.out_after, []).append(move)
        gone.setdefault(move.gone_after, []).append(move)
        back.setdefault(move.back_before, []).append(move)
    for several in back.values():
        several.sort(key=lambda move: first_read(problem, steps, move))
    now = 0.0
    busy = {"out": 0.0, "in": 0.0}  # until when each direction is taken
    worked = {"out": 0.0, "in": 0.0}
    out_done: dict[int, float] = {}
    in_done: dict[int, float] = {}
    stalls: list[tuple[int, float]] = []
    begins = []

    def copy(direction: str, taken_ms: float) -> float:
        free = max(busy.values()) if link.is_shared else busy[direction]
        busy[direction] = max(now, free) + taken_ms
        worked[direction] += taken_ms
        return busy[direction]

    def wait(t: int, until: float) -> None:
        nonlocal now
        if until > now:
            stalls.append((t, until - now))
            now = until

    sizes = problem.sizes
    for t, step in enumerate(steps):
        for move in back.get(t, ()):
            in_done[move.storage] = copy("in", link.in_ms(sizes[move.storage]))
        for index in problem.reads(*step):
            if index in in_done:
                wait(t, in_done.pop(index))
        begins.append(now)
        now += problem.time_ms(*step)
        for move in gone.get(t, ()):
            if move in copied and move.out_after == t:  # it starts and must end here
                out_done[move.storage] = copy("out", link.out_ms(sizes[move.storage]))
                outs[t] = [m for m in outs.get(t, ()) if m.storage != move.storage]
            wait(t, max(out_done[move.storage], in_done.pop(move.storage, 0.0)))
        for move in outs.get(t, ()):
            out_done[move.storage] = copy("out", link.out_ms(sizes[move.storage]))
    computed = sum(problem.time_ms(*step) for step in steps)
    return Clocks(
        now, max(0.0, now - computed), tuple(stalls), worked["out"], worked["in"], tuple(begins)
    )
