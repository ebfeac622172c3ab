"""Moves: a storage leaves the device between two of its uses, and comes back before the second.

A plan says at the end of which steps the copy begins and the memory is freed, and before which step
it comes back. The content waits in an arena, whose size and layout are known here. All of this is a
matter of order: the program waits for a copy where the order needs it, so a slow copy takes time
and no memory.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rkgb.copies import in_pages
from rkgb.elements.target import target_of
from rkgb.errors import InvalidGraphError
from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.graphs.uses import roots_of
from rkgb.run.graph.node_storages import storages_of
from rkgb.run.program.places import Step
from rkgb.run.program.statements import (
    Give,
    MoveOut,
    Moving,
    Statement,
    TakeArena,
    made_by,
    read_by,
)


@dataclass(frozen=True, slots=True)
class RootMove:
    """The storage of `root` is away between two steps of a plan, which have these indices.

    At the end of `out_after` its copy begins; at the end of `gone_after` it has been copied and is
    freed. Just before `back_before` its memory is taken again and is filled; the first step that
    reads it waits. If it was moved before and not made again since, nothing is copied out.
    """

    root: str  # the value that made it
    out_after: int
    gone_after: int
    back_before: int


def movable_roots(sg: SimplifiedGraph) -> frozenset[str]:
    """Return the storages that may be moved: nobody but the program holds or changes them.

    The user holds outputs, autograd holds gradients, and calls of the user's Python may hold what
    they take and return.
    """
    infos = sg.infos
    held = roots_of(infos, sg.output_names)
    for node in sg.nodes:
        held |= roots_of(infos, (hand_over.value for hand_over in node.hand_overs))
        for op in (*node.ops, *node.backward):
            if target_of(op).runs_python or target_of(op).whole is not None:
                held |= roots_of(infos, (*filter(None, op.results), *op.inputs))
    held.update(sg.uses_behind.writes)
    for root, places in sg.uses.writes.items():
        if any(at.part != sg.producer.get(root) for at in places):
            held.add(root)
    storages = (storage for made in storages_of(sg) for storage in made)
    return frozenset(
        storage.root
        for storage in storages
        if storage.size_bytes and storage.root not in held and _is_strided(sg, storage.root)
    )


def _is_strided(sg: SimplifiedGraph, root: str) -> bool:
    info = sg.infos[root]
    return len(info.stride) == len(info.shape)


@dataclass(frozen=True, slots=True)
class _Uses:
    """The steps that read a storage, and those that make it."""

    reads: list[int]
    makes: list[int]

    def read_before(self, start: float, end: float) -> bool:
        """Whether a step from `start` on and before `end` reads it."""
        return any(start <= t < end for t in self.reads)

    def next_make(self, after: int) -> float:
        return next((t for t in self.makes if t > after), math.inf)


def _uses(sg: SimplifiedGraph, steps: Sequence[Step]) -> dict[str, _Uses]:
    at: dict[Step, list[int]] = defaultdict(list)
    for t, step in enumerate(steps):
        at[step].append(t)
    found = {}
    for storage in (storage for made in storages_of(sg) for storage in made):
        readers: list[Step] = [("F", user) for user in storage.fwd_users]
        readers += [("B", user) for user in storage.bwd_users]
        reads = sorted(t for reader in readers for t in at.get(reader, ()))
        found[storage.root] = _Uses(reads, at.get(("F", storage.producer), []))
    return found


def kept_moves(
    sg: SimplifiedGraph, kept: Sequence[tuple[float, Step]], moves: Sequence[RootMove]
) -> tuple[RootMove, ...]:
    """Return the moves among the steps that are kept, each with its place in the whole plan.

    What nothing reads later is dropped in time without a move. A step that only these gradients
    need may read what is away in the whole plan: it comes back before that step.
    """
    places = [place for place, _ in kept]
    uses = _uses(sg, [step for _, step in kept])
    found: dict[str, list[RootMove]] = defaultdict(list)
    for move in sorted(moves, key=lambda move: move.out_after):
        if move.root not in uses:
            continue
        out, gone = (
            bisect.bisect_right(places, end) - 1 for end in (move.out_after, move.gone_after)
        )
        use = uses[move.root]
        arrival = next((t for t in use.reads if t > gone), math.inf)
        if arrival > use.next_make(out) or arrival == math.inf:
            continue
        back = bisect.bisect_left(places, move.back_before)
        now = RootMove(move.root, out, gone, int(min(back, arrival)))
        earlier = found[move.root]
        last = earlier[-1] if earlier else None
        if last is None or use.next_make(last.out_after) <= out:
            earlier.append(now)
        elif use.read_before(last.back_before, gone + 1):
            earlier.append(replace(now, out_after=max(out, last.back_before)))
        else:  # nothing reads it between the two
            earlier[-1] = replace(last, back_before=now.back_before)
    return tuple(move for several in found.values() for move in several)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A move in a program: whether its content is copied out, and the step that waits for it."""

    move: RootMove
    is_copied: bool
    arrival: int
    at_end: bool  # of that step, because only the next move needs it


def with_moves(
    sg: SimplifiedGraph,
    steps: Sequence[Step],
    parts: Sequence[Sequence[Statement]],
    moves: Sequence[RootMove],
) -> list[list[Statement]]:
    """Return the statements of each step with those of the moves.

    Raises:
        InvalidGraphError: a storage cannot be moved, or is needed while it is away.
    """
    placed = _placed(sg, steps, moves)
    offsets, arena_bytes = _layout(sg, placed)
    sources = _sources(sg, parts, placed)
    before: dict[int, list[Statement]] = defaultdict(list)
    after: dict[int, list[Statement]] = defaultdict(list)
    for one in placed:  # first what makes room
        move, name = one.move, f"moved_{one.move.root}"
        if one.at_end:
            after[one.arrival].append(Moving(name, "arrive"))
        if not one.is_copied or move.out_after < move.gone_after:
            after[move.gone_after].append(Moving(name, "leave"))
    for one in sorted(placed, key=lambda one: one.arrival):  # what is read first comes first
        before[one.move.back_before].append(Moving(f"moved_{one.move.root}", "back"))
    for one, offset in zip(placed, offsets, strict=True):
        move, name = one.move, f"moved_{one.move.root}"
        if one.is_copied:
            size_bytes = sg.infos[move.root].storage_bytes
            after[move.out_after].append(MoveOut(name, sources[move], offset, size_bytes))
            if move.out_after == move.gone_after:
                after[move.gone_after].append(Moving(name, "leave"))
        if not one.at_end:
            before[one.arrival].append(Moving(name, "arrive"))
    if placed:
        before[0].insert(0, TakeArena(arena_bytes))
    result = []
    for t, part in enumerate(parts):
        end = len(part) - sum(isinstance(statement, Give) for statement in part)
        result.append([part[0], *before[t], *part[1:end], *after[t], *part[end:]])
    return result


def _placed(sg: SimplifiedGraph, steps: Sequence[Step], moves: Sequence[RootMove]) -> list[_Placed]:
    uses, movable = _uses(sg, steps), movable_roots(sg)
    by_root: dict[str, list[RootMove]] = defaultdict(list)
    for move in sorted(moves, key=lambda move: move.out_after):
        by_root[move.root].append(move)
    found = []
    for root, several in by_root.items():
        _expect(sg, root in movable, f"'{root}', which others than the program may hold or change")
        use = uses[root]
        for place, move in enumerate(several):
            last = several[place - 1] if place else None
            following = several[place + 1] if place + 1 < len(several) else None
            first = last.back_before if last else 0
            in_order = first <= move.out_after <= move.gone_after < move.back_before < len(steps)
            _expect(sg, in_order, f"'{root}' in another order than out, gone and back: {move}")
            is_made = any(t <= move.out_after for t in use.makes)
            remade = use.next_make(move.out_after)
            is_read = use.read_before(move.gone_after + 1, min(move.back_before, remade))
            _expect(sg, is_made, f"'{root}' before it is made: {move}")
            _expect(sg, not is_read, f"'{root}', which a step reads while it is away: {move}")
            arrival = next((t for t in use.reads if t >= move.back_before), math.inf)
            _expect(sg, arrival < remade, f"'{root}', which nothing reads later: {move}")
            at_end = following is not None and following.gone_after < arrival
            if following is not None and at_end:
                arrival = following.gone_after
            is_copied = last is None or use.next_make(last.out_after) <= move.out_after
            found.append(_Placed(move, is_copied, int(arrival), at_end))
    return sorted(found, key=lambda one: one.move.out_after)


def _expect(sg: SimplifiedGraph, fact: bool, otherwise: str) -> None:
    if not fact:
        name = sg.basic.model_name
        raise InvalidGraphError(f"the plan of {name} moves {otherwise}.")


def _layout(sg: SimplifiedGraph, placed: Sequence[_Placed]) -> tuple[list[int], int]:
    """Return the place of each move in the arena, and the arena's size.

    A place is free again once its content has come back for the last time. The largest ones choose
    first.
    """
    lives: list[tuple[int, int, int]] = []  # size, first step after which it is taken, last step
    life_of: list[int] = []
    latest: dict[str, int] = {}
    for one in placed:
        root = one.move.root
        if one.is_copied:
            latest[root] = len(lives)
            size_bytes = in_pages(sg.infos[root].storage_bytes)
            lives.append((size_bytes, one.move.out_after, one.arrival))
        at = latest[root]
        life_of.append(at)
        lives[at] = (*lives[at][:2], one.arrival)
    offsets = [0] * len(lives)
    done: list[int] = []
    for at in sorted(range(len(lives)), key=lambda at: -lives[at][0]):
        size_bytes, start, end = lives[at]
        beside = [b for b in done if lives[b][1] < end and start < lives[b][2]]
        place = 0
        for other in sorted(beside, key=lambda b: offsets[b]):
            if place + size_bytes <= offsets[other]:
                break
            place = max(place, offsets[other] + lives[other][0])
        offsets[at] = place
        done.append(at)
    total = max((offset + life[0] for offset, life in zip(offsets, lives, strict=True)), default=0)
    return [offsets[at] for at in life_of], total


def _sources(
    sg: SimplifiedGraph, parts: Sequence[Sequence[Statement]], placed: Sequence[_Placed]
) -> dict[RootMove, str]:
    """Return for each move a variable in its storage that lives on after the copy has begun."""
    wanted: dict[int, list[RootMove]] = defaultdict(list)
    for one in placed:
        if one.is_copied:
            wanted[one.move.out_after].append(one.move)
    infos = sg.infos
    live: dict[str, dict[str, None]] = {one.move.root: {} for one in placed}
    found = {}
    for t in range(len(parts) - 1, -1, -1):
        for move in wanted[t]:
            _expect(sg, bool(live[move.root]), f"'{move.root}', which nothing reads later: {move}")
            found[move] = next(iter(live[move.root]))
        for statement in reversed(parts[t]):
            for name in made_by(statement):
                if name in infos and infos[name].alias_of in live:
                    live[infos[name].alias_of].pop(name, None)
            for name in read_by(statement):
                if name in infos and infos[name].alias_of in live:
                    live[infos[name].alias_of][name] = None
    return found
