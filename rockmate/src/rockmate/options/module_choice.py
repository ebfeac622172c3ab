"""One option for every module of a step, chosen together within one budget.

The modules run one after the other in the forward and in the reverse order in the backward. Code
between them runs unchanged. Memory was measured at every moment of a step with known options. Other
options change what modules keep between forward and backward. Let K(i) be the sum of these changes
over the first i modules. Every limit is then one on K(i), or on K(i-1) and the option of module i:

    forward of i     start + K(i-1) + forward peak of the option
    after it         highest + K(i)
    backward of i    base + K(i-1) + backward peak of the option, which counts what it keeps
    after it         highest + K(i-1)

Dynamic programming over i, on the undominated pairs (K, time), finds the fastest choice. It is
exact and linear in their number. If there are more than `_MOST_STATES`, K is rounded up, which is
safe. With several micro-batches in flight, the bytes that one holds between its passes count once
for each other one. The table is made once for each bound on these bytes.

What is elsewhere may have a limit for all modules together. A byte there then gets a price in time,
and the same program finds the two choices between which the best one lies. From these on, modules
get faster options one by one, as long as there is room.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rockmate.options.options import BlockOption

_Array = npt.NDArray[Any]
_MOST_STATES = 4000
_NEVER = 1 << 60  # bytes that nothing has room for
_MOST_PRICES = 30  # of a byte elsewhere, to try
_SHARES = 48  # number of bounds to try on the bytes that a micro-batch in flight holds


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One module of a step: its options, and the memory around it with the option `reference`.

    All bytes are above what was in use before the step.
    """

    name: str
    options: tuple[BlockOption, ...]
    reference: int  # index of the option with which the memory was measured
    more_bytes: tuple[int, ...]  # that each option keeps beyond the reference
    forward_start_bytes: int
    after_forward_bytes: int  # peak until the next module's forward, or the turn
    backward_base_bytes: int  # without the module's kept bytes and its outputs' gradients
    after_backward_bytes: int  # peak until the next module's backward, or the end
    more_forward_bytes: int = 0  # measured in the forward beyond the option's peak
    more_backward_bytes: int = 0  # the same in the backward: gathered or summed gradients


@dataclass(frozen=True, slots=True)
class StepMemory:
    """A measured step: its modules in forward order, and its other memory."""

    calls: tuple[ModuleCall, ...]
    before_bytes: int  # peak before the first module's forward
    turn_bytes: int  # peak between the last forward and the first backward
    held_bytes: int  # in use at the end of the forward
    in_flight: int = 1  # largest number of micro-batches between forward and backward
    host_limit: int | None = None  # most bytes elsewhere of all modules of one micro-batch


@dataclass(frozen=True, slots=True)
class _States:
    """The first modules with an option each, one state in each place of the arrays."""

    kept_bytes: _Array  # beyond the measured ones
    time_ms: _Array
    option: _Array  # of the last module
    parent: _Array  # place of the state without the last module

    @classmethod
    def first(cls) -> _States:
        """Return the state without a module."""
        one = np.zeros(1, dtype=np.int64)
        return cls(one, np.zeros(1), one, one)

    def followed_by(self, call: ModuleCall, most_before: Sequence[int]) -> _States:
        """Return the states with one more module, in each option that what is kept leaves room."""
        counts = np.searchsorted(self.kept_bytes, most_before, side="right")
        rows = [
            (self.kept_bytes[:n] + more, self.time_ms[:n] + option.overhead_ms)
            for n, more, option in zip(counts, call.more_bytes, call.options, strict=True)
        ]
        kept, time_ms = map(np.concatenate, zip(*rows, strict=True))
        option = np.repeat(np.arange(len(counts)), counts)
        return _States(kept, time_ms, option, np.concatenate([np.arange(n) for n in counts]))

    def undominated(self) -> _States:
        """Return the undominated states, in order of the bytes that they keep."""
        states = self._rounded() if len(self.time_ms) > _MOST_STATES else self
        states = states._at(np.lexsort((states.time_ms, states.kept_bytes)))
        best = np.minimum.accumulate(states.time_ms)
        return states._at(np.flatnonzero(states.time_ms < np.concatenate([[np.inf], best[:-1]])))

    def _rounded(self) -> _States:
        """Return coarser states; the least stays exact, so a feasible choice is never lost."""
        kept = self.kept_bytes
        grain = max(1, int(kept.max() - kept.min()) // _MOST_STATES)
        least = np.lexsort((self.time_ms, kept))[:1]
        coarse = replace(self, kept_bytes=-(-kept // grain) * grain)
        exact = self._at(least)
        pairs = ((getattr(coarse, f.name), getattr(exact, f.name)) for f in fields(self))
        return _States(*map(np.concatenate, pairs))

    def _at(self, places: _Array) -> _States:
        return _States(*(getattr(self, field.name)[places] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class Choice:
    """An option for every module, by index, and the resulting peak and extra time."""

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
    """Return a step whose bytes, at every moment and for every option, are the largest of all.

    Processes that share a model choose for this step: a choice that fits it fits each of them. The
    times are those of the first.
    """
    calls = tuple(map(_largest_call, zip(*(step.calls for step in steps), strict=True)))
    return replace(steps[0], calls=calls, **_most(steps))


def only(step: StepMemory, allowed: Sequence[Collection[int]]) -> StepMemory:
    """Return a step in which each module runs one of its `allowed` options."""
    calls = []
    for call, numbers in zip(step.calls, allowed, strict=True):
        more = (n if place in numbers else _NEVER for place, n in enumerate(call.more_bytes))
        calls.append(replace(call, more_bytes=tuple(more)))
    return replace(step, calls=tuple(calls))


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
    """Return the choice of least extra time whose peak is within the budget, or None.

    With a limit for what is elsewhere it may be slower than the best, but no option of one module
    makes it faster, and it is no slower than the best of equal parts for all modules.
    """
    fast = _fastest_of_all(step, budget_bytes)
    limit = step.host_limit
    if fast is None or limit is None or _there(step, fast) <= limit:
        return _choice(step, fast)
    slow = _least_elsewhere(step, budget_bytes)
    if slow is None or _there(step, slow) > limit:
        return None
    part = limit // len(step.calls)
    small = [{n for n, o in enumerate(c.options) if o.host_bytes <= part} for c in step.calls]
    equal = _fastest_of_all(only(step, small), budget_bytes)
    found = [way for way in (slow, equal) if way is not None]
    for _ in range(_MOST_PRICES):  # at which both are as good; another is better, or there is none
        saved_ms = _time(step, slow) - _time(step, fast)
        price = saved_ms / (_there(step, fast) - _there(step, slow))
        between = _fastest_of_all(_priced(step, price), budget_bytes)
        if between is None or saved_ms <= 0 or between in (fast, slow):
            break
        if _there(step, between) > limit:
            fast = between
        else:
            slow = between
            found.append(between)
    better = (_with_all_room(step, way, budget_bytes) for way in dict.fromkeys(found))
    return _choice(step, min(better, key=lambda way: _time(step, way)))


def _choice(step: StepMemory, found: tuple[int, ...] | None) -> Choice | None:
    return None if found is None else Choice(found, peak_of(step, found), _time(step, found))


def _least_elsewhere(step: StepMemory, budget_bytes: int) -> tuple[int, ...] | None:
    longest_ms = sum(max(option.overhead_ms for option in call.options) for call in step.calls)
    return _fastest_of_all(_priced(step, 1 + longest_ms), budget_bytes)


def _priced(step: StepMemory, price: float) -> StepMemory:
    """Return a step in which each byte elsewhere takes some time."""
    calls = []
    for call in step.calls:
        options = (
            replace(option, overhead_ms=option.overhead_ms + price * option.host_bytes)
            for option in call.options
        )
        calls.append(replace(call, options=tuple(options)))
    return replace(step, calls=tuple(calls))


def _with_all_room(
    step: StepMemory, options: tuple[int, ...], budget_bytes: int
) -> tuple[int, ...]:
    """Return a choice in which no module has a faster option that also fits."""
    assert step.host_limit is not None
    while True:
        best = options
        for place, call in enumerate(step.calls):
            for number in range(len(call.options)):
                other = (*options[:place], number, *options[place + 1 :])
                if (
                    _time(step, other) < _time(step, best)
                    and _there(step, other) <= step.host_limit
                    and peak_of(step, other) <= budget_bytes
                ):
                    best = other
        if best == options:
            return options
        options = best


def _fastest_of_all(step: StepMemory, budget_bytes: int) -> tuple[int, ...] | None:
    """Return the fastest options within the budget, whatever is elsewhere."""
    found: tuple[int, ...] | None = None
    for most in _bounds(step):
        others = (step.in_flight - 1) * (step.held_bytes + (most or 0))
        chosen = _fastest(step, budget_bytes - others, most)
        if chosen is not None and (found is None or _time(step, chosen) < _time(step, found)):
            found = chosen
    return found


def smallest_budget(step: StepMemory) -> int:
    """Return the smallest budget for which there is a choice."""
    low, high = 0, peak_of(step, [call.reference for call in step.calls])
    while low < high:
        middle = (low + high) // 2
        if not _is_feasible(step, middle):
            low = middle + 1
        else:
            high = middle
    return high


def _is_feasible(step: StepMemory, budget_bytes: int) -> bool:
    """Return whether there is a choice. All limits are upper ones, so the least K decides."""
    if step.host_limit is not None:
        least = _least_elsewhere(step, budget_bytes)
        return least is not None and _there(step, least) <= step.host_limit
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
    """Return the most that earlier modules may keep if this one runs option `number`."""
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
    """Return the peak of a module's two passes, with all others as measured."""
    option = call.options[number]
    return max(
        call.forward_start_bytes + option.fwd_peak_bytes + call.more_forward_bytes,
        call.backward_base_bytes + option.bwd_peak_bytes + call.more_backward_bytes,
    )


def _time(step: StepMemory, options: Sequence[int]) -> float:
    pairs = zip(step.calls, options, strict=True)
    return sum(call.options[number].overhead_ms for call, number in pairs)


def _there(step: StepMemory, options: Sequence[int]) -> int:
    pairs = zip(step.calls, options, strict=True)
    return sum(call.options[number].host_bytes for call, number in pairs)


def _bounds(step: StepMemory) -> Sequence[int | None]:
    """Return bounds to try on what all modules keep beyond the measured bytes; None: no bound."""
    if step.in_flight == 1:
        return [None]
    kept = [[more for more in call.more_bytes if more < _NEVER] or [0] for call in step.calls]
    least, most = sum(map(min, kept)), sum(map(max, kept))
    return sorted({least + (most - least) * i // _SHARES for i in range(_SHARES + 1)})


def _fastest(step: StepMemory, room_bytes: int, most: int | None) -> tuple[int, ...] | None:
    """Return the fastest options within `room_bytes` that keep at most `most` more bytes."""
    if step.before_bytes > room_bytes:
        return None
    states, last = _States.first(), len(step.calls) - 1
    made: list[_States] = []
    for place, call in enumerate(step.calls):
        turns = place == last
        before = [
            _most_before(step, call, number, room_bytes, most, turns=turns)
            for number in range(len(call.options))
        ]
        states = states.followed_by(call, before).undominated()
        if not len(states.time_ms):
            return None
        made.append(states)
    chosen, at = list[int](), -1  # times fall while the bytes grow: the last is the fastest
    for states in reversed(made):
        chosen.append(int(states.option[at]))
        at = states.parent[at]
    return tuple(reversed(chosen))
