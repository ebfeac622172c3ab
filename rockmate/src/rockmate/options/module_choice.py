"""One option for every module of a step, chosen together within one budget.

The modules run one after the other in the forward and in the reverse order in the backward. What
is between them runs as it is. So at every moment the memory is what was measured there in a step
with known options, and the difference that other options make: of all modules whose forward has
run and whose backward has not, what they keep. With K(i) the sum of these differences over the
first i modules, every bound is one on K(i) or on K(i-1) and the option of module i:

    forward of i     start + K(i-1) + forward peak of the option
    after it         highest + K(i)
    backward of i    base + K(i-1) + backward peak of the option, which counts what it keeps
    after it         highest + K(i-1)

The fastest choice is found by dynamic programming over i, with the pairs (K, time) of which none
is better in both: exact, in time linear in their number (`_MOST_STATES` bounds it: beyond, K is
rounded up, which is on the safe side). With micro-batches in flight, what one of them holds between
its passes counts as often as there are others; for each bound on that the table is made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from rockmate.options.options import BlockOption

_MOST_STATES = 4000
_SHARES = 48  # bounds that are tried on what a micro-batch in flight holds


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One module of a step: its options, and the memory around it where `reference` was run.

    All bytes are above what was in use before the step.
    """

    name: str
    options: tuple[BlockOption, ...]
    reference: int  # index of the option with which the memory was measured
    more_bytes: tuple[int, ...]  # that each option keeps beyond the reference
    forward_start_bytes: int
    after_forward_bytes: int  # the highest until the next module's forward, or the turn
    backward_base_bytes: int  # without what the module keeps, and the gradients of its outputs
    after_backward_bytes: int  # the highest until the next module's backward, or the end
    more_forward_bytes: int = 0  # measured in the forward, beyond what the option says
    more_backward_bytes: int = 0  # the same in the backward: gathered or summed gradients


@dataclass(frozen=True, slots=True)
class StepMemory:
    """A measured step: its modules in forward order, and what else it takes."""

    calls: tuple[ModuleCall, ...]
    before_bytes: int  # the highest before the first module's forward
    turn_bytes: int  # the highest between the last forward and the first backward
    held_bytes: int  # in use when the forward has ended
    in_flight: int = 1  # forwards that have run and whose backwards have not, at most


class _State(NamedTuple):
    """The first modules with an option each: what they keep beyond what was measured."""

    kept_bytes: int
    time_ms: float
    option: int  # of the last of them
    before: _State | None


@dataclass(frozen=True, slots=True)
class Choice:
    """An option for every module, by index, and the peak and the extra time that they make."""

    options: tuple[int, ...]
    peak_bytes: int
    overhead_ms: float


def measured_as(step: StepMemory, other: StepMemory) -> StepMemory:
    """Return a step as if it had been measured with the references of another."""
    calls, kept = [], 0
    for call, wanted in zip(step.calls, other.calls, strict=True):
        more = wanted.more_bytes[call.reference]
        calls.append(
            replace(
                call,
                reference=wanted.reference,
                more_bytes=wanted.more_bytes,
                forward_start_bytes=call.forward_start_bytes - kept,
                after_forward_bytes=call.after_forward_bytes - kept - more,
                backward_base_bytes=call.backward_base_bytes - kept,
                after_backward_bytes=call.after_backward_bytes - kept,
            )
        )
        kept += more
    turn, held = step.turn_bytes - kept, step.held_bytes - kept
    return replace(step, calls=tuple(calls), turn_bytes=turn, held_bytes=held)


def largest(steps: Sequence[StepMemory]) -> StepMemory:
    """Return one step that takes, at every moment and for every option, the most that any takes.

    Processes that share a model choose for it: what fits there fits into each of them. The times
    are the first one's.
    """
    calls = tuple(map(_largest_call, zip(*(step.calls for step in steps), strict=True)))
    return replace(steps[0], calls=calls, **_most(steps))


def _largest_call(calls: Sequence[ModuleCall]) -> ModuleCall:
    rows = zip(*(call.options for call in calls), strict=True)
    options = tuple(replace(row[0], **_most(row)) for row in rows)
    more = tuple(map(max, zip(*(call.more_bytes for call in calls), strict=True)))
    return replace(calls[0], **{**_most(calls), "options": options, "more_bytes": more})


def _most(parts: Sequence[Any]) -> dict[str, Any]:
    """Return the largest of all bytes by the names of their fields."""
    names = (f.name for f in fields(parts[0]) if f.name.endswith("_bytes"))
    return {name: max(getattr(part, name) for part in parts) for name in names}


def peak_of(step: StepMemory, options: Sequence[int]) -> int:
    """Return the peak of a step with these options, outputs of the other micro-batches included."""
    peak = max(step.before_bytes, 0)
    kept = 0
    for call, number in zip(step.calls, options, strict=True):
        more = call.more_bytes[number]
        peak = max(peak, _own_peak(call, number) + kept, call.after_forward_bytes + kept + more)
        peak = max(peak, call.after_backward_bytes + kept)
        kept += more
    return max(peak, step.turn_bytes + kept) + (step.in_flight - 1) * (step.held_bytes + kept)


def choose(step: StepMemory, budget_bytes: int) -> Choice | None:
    """Return the choice of least extra time whose peak is within the budget; None if none is."""
    found: tuple[int, ...] | None = None
    for most in _bounds(step):
        others = (step.in_flight - 1) * (step.held_bytes + (most or 0))
        chosen = _fastest(step, budget_bytes - others, most)
        if chosen is not None and (found is None or _time(step, chosen) < _time(step, found)):
            found = chosen
    if found is None:
        return None
    return Choice(found, peak_of(step, found), _time(step, found))


def smallest_budget(step: StepMemory) -> int:
    """Return the smallest budget within which there is a choice."""
    low, high = 0, peak_of(step, [call.reference for call in step.calls])
    while low < high:
        middle = (low + high) // 2
        if not _is_feasible(step, middle):
            low = middle + 1
        else:
            high = middle
    return high


def _is_feasible(step: StepMemory, budget_bytes: int) -> bool:
    """Whether there is a choice: all bounds are from above, so the least K is enough to know."""
    for most in _bounds(step):
        others = (step.in_flight - 1) * (step.held_bytes + (most or 0))
        room, kept = budget_bytes - others, 0
        found = step.before_bytes <= room
        for place, call in enumerate(step.calls):
            turns = place + 1 == len(step.calls)
            fitting = [
                more
                for number, more in enumerate(call.more_bytes)
                if kept <= _most_before(step, call, number, room, most, turns=turns)
            ]
            if not fitting:
                found = False
                break
            kept += min(fitting)
        if found:
            return True
    return False


def _most_before(
    step: StepMemory, call: ModuleCall, number: int, room: int, most: int | None, *, turns: bool
) -> int:
    """Return the most that modules before this one may keep, where it runs an option."""
    more = call.more_bytes[number]
    before = min(
        room - _own_peak(call, number),
        room - call.after_backward_bytes,
        room - call.after_forward_bytes - more,
    )
    if turns:
        before = min(before, room - step.turn_bytes - more)
        before = before if most is None else min(before, most - more)
    return before


def _own_peak(call: ModuleCall, number: int) -> int:
    """Return the peak of a module's two passes, where all others are as they were measured."""
    option = call.options[number]
    return max(
        call.forward_start_bytes + option.fwd_peak_bytes + call.more_forward_bytes,
        call.backward_base_bytes + option.bwd_peak_bytes + call.more_backward_bytes,
    )


def _time(step: StepMemory, options: Sequence[int]) -> float:
    pairs = zip(step.calls, options, strict=True)
    return sum(call.options[number].overhead_ms for call, number in pairs)


def _bounds(step: StepMemory) -> Sequence[int | None]:
    """Bounds on what all modules keep beyond what was measured; None: as much as they like."""
    if step.in_flight == 1:
        return [None]
    least = sum(min(call.more_bytes) for call in step.calls)
    most = sum(max(call.more_bytes) for call in step.calls)
    return sorted({least + (most - least) * i // _SHARES for i in range(_SHARES + 1)})


def _fastest(step: StepMemory, room_bytes: int, most: int | None) -> tuple[int, ...] | None:
    """Return the fastest options of one step within `room_bytes`, keeping `most` more at most."""
    if step.before_bytes > room_bytes:
        return None
    states: list[_State] = [_State(0, 0.0, -1, None)]
    last = len(step.calls) - 1
    for place, call in enumerate(step.calls):
        made: list[_State] = []
        for number, option in enumerate(call.options):
            more = call.more_bytes[number]
            before = _most_before(step, call, number, room_bytes, most, turns=place == last)
            for state in states:
                if state.kept_bytes > before:
                    break
                time_ms = state.time_ms + option.overhead_ms
                made.append(_State(state.kept_bytes + more, time_ms, number, state))
        states = _undominated(made)
        if not states:
            return None
    best: _State | None = min(states, key=lambda state: (state.time_ms, state.kept_bytes))
    chosen: list[int] = []
    while best is not None and best.before is not None:
        chosen.append(best.option)
        best = best.before
    return tuple(reversed(chosen))


def _undominated(made: list[_State]) -> list[_State]:
    """Return the states of which none is better in both, in order of what they keep."""
    if len(made) > _MOST_STATES:
        kept = [state.kept_bytes for state in made]
        grain = max(1, (max(kept) - min(kept)) // _MOST_STATES)
        least = min(
            made, key=lambda state: state[:2]
        )  # stays exact: there is a choice wherever one is
        made = [s._replace(kept_bytes=-(-s.kept_bytes // grain) * grain) for s in made]
        made.append(least)
    made.sort(key=lambda state: state[:2])
    found: list[_State] = []
    for state in made:
        if not found or state.time_ms < found[-1].time_ms:
            found.append(state)
    return found
