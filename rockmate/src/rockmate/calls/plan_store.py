"""The plans of one module by key; the least recently used one is dropped first.

`AnyNumber` tells for which numbers a general plan is tried; a few failures end the tries.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rockmate.guards.input_signature import for_any_number, other_ints, unlike
from rockmate.guards.module_state import Place, WatchedState
from rockmate.reports.in_full import InFull

if TYPE_CHECKING:
    from rockmate.networks import Planned


_MOST_WHOLE = 4  # sets of open places of ints that are tried for an unknown key


@dataclass(frozen=True, slots=True)
class Key:
    """The assumptions of a plan."""

    state: WatchedState
    inputs: Hashable
    autocast: Hashable
    flags: Hashable

    def __hash__(self) -> int:  # flags hardly ever change
        return hash((id(self.state), self.inputs))

    def for_any_number(self, whole: Collection[int] = ()) -> Key | None:
        """Return the key of calls that differ only in floats, and in the ints at `whole`.

        None means that there are no such numbers.
        """
        inputs = for_any_number(self.inputs, whole)
        return None if inputs is None else replace(self, inputs=inputs)

    def unlike(self, other: Key) -> str:
        """Say in words how this key differs from `other`."""
        found = [] if self.inputs == other.inputs else unlike(self.inputs, other.inputs)
        found += [] if self.state is other.state else self.state.unlike(other.state)
        if self.autocast != other.autocast:
            found.append("another autocast region")
        if self.flags != other.flags:
            found.append("other flags of torch that choose kernels")
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return ", ".join(found[:3]) + more if found else "its plan was dropped"


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One plan in the report: its calls, the reason for it, and the time that planning took."""

    what: str  # the inputs
    why: str
    how: str  # "planned"; "recorded": another plan's steps served; "resized" from other plans
    seconds: float
    peak_bytes: int  # predicted
    budget_bytes: int
    overhead: float  # recomputation, as a share of the plain step's time

    def __str__(self) -> str:
        return (
            f"{self.how} in {self.seconds:.1f} s, peak {self.peak_bytes} of {self.budget_bytes} "
            f"bytes, {100 * self.overhead:.1f} % computed again: {self.what} ({self.why})"
        )


class PlanRows(tuple[PlanRow, ...], InFull):
    """The kept plans, the last used one at the end; printed, it shows a line for each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    __repr__ = __str__


@dataclass
class Family:
    """The plans for calls of one key.

    Most keys have one. If a forward reads values of its inputs, each way through it has a plan. The
    last used one comes first.
    """

    variants: list[Planned]
    row: PlanRow
    looks: int = 1  # number of calls to come that are recorded again, to compare

    def made_of(self, chosen: Callable[[Planned], Planned]) -> Family:
        """Return a family of the choices for each plan."""
        return replace(self, variants=[chosen(planned) for planned in self.variants])

    def takes(self, leaves: Sequence[Any]) -> bool:
        """Return whether a general plan serves these leaves, and move it to the front."""

        def serves(planned: Planned) -> bool:
            return planned.numbers is not None and planned.numbers.of(leaves) is not None

        return self._first(serves) is not None

    def fitting(self, look_up: Callable[[Planned], Mapping[str, Tensor]]) -> Planned | None:
        """Return the plan whose recording went the way that this call goes.

        `look_up` returns the values that exist before a step of a plan.
        """
        return self._first(lambda planned: planned.outcomes.hold(look_up(planned)))

    def _first(self, fits: Callable[[Planned], bool]) -> Planned | None:
        """Return the first variant that fits, and move it to the front."""
        for place, planned in enumerate(self.variants):
            if fits(planned):
                if place:
                    self.variants.insert(0, self.variants.pop(place))
                return planned
        return None


class PlanStore:
    """At most `most` families."""

    def __init__(self, most: int) -> None:
        self.most = max(1, most)
        self.families: OrderedDict[Key, Family] = OrderedDict()
        self._last: tuple[Key, Family] | None = None  # most calls ask for it again
        self._whole: list[frozenset[int]] = [frozenset()]  # open places of ints

    def get(self, key: Key) -> Family | None:
        """Return the family of a key, and mark it as the last used one."""
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        family = self.families.get(key)
        if family is not None:
            self.families.move_to_end(key)
            self._last = key, family
        return family

    def for_any_number(self, key: Key, leaves: Sequence[Any]) -> Family | None:
        """Return the family of a general plan that serves a call of an unknown key."""
        for whole in self._whole:
            general = key.for_any_number(whole)
            family = None if general is None else self.get(general)
            if family is not None and family.takes(leaves):
                return family
        return None

    def ints_unlike(self, key: Key) -> frozenset[int] | None:
        """Return the places of ints that differ from those of a key that differs only in numbers.

        None means that no plan has such a key.
        """
        for other in reversed(self.families):
            if replace(other, inputs=key.inputs) == key:
                whole = other_ints(key.inputs, other.inputs)
                if whole is not None and key.for_any_number(whole) is not None:
                    return whole
        return None

    def attributes_unlike(self, key: Key) -> tuple[tuple[Place, ...], frozenset[int]]:
        """Return attributes and places of ints that differ from a key that differs only in numbers.

        No attributes means that no plan has such a key.
        """
        for other in reversed(self.families):
            if other.autocast == key.autocast and other.flags == key.flags:
                names = key.state.numbers_unlike(other.state)
                whole = other_ints(key.inputs, other.inputs)
                if names and whole is not None:
                    return names, whole
        return (), frozenset()

    def look_for(self, whole: frozenset[int]) -> None:
        """Try general plans with these open places from now on."""
        if whole not in self._whole:
            self._whole = [*self._whole, whole][-_MOST_WHOLE:]

    def put(self, key: Key, family: Family) -> bool:
        """Keep a family; return whether others were dropped for it."""
        self._last = None
        self.families[key] = family
        dropped = len(self.families) > self.most
        while len(self.families) > self.most:
            del self.families[self._least_missed()]
        return dropped

    def drop(self, is_wrong: Callable[[Planned], bool]) -> None:
        """Drop wrong plans, and then families without plans."""
        self._last = None
        for key, family in list(self.families.items()):
            family.variants = [planned for planned in family.variants if not is_wrong(planned)]
            if not family.variants:
                del self.families[key]

    def _least_missed(self) -> Key:
        """Return the least recently used key.

        If more than half of the keys differ from others only in numbers, it is one of those. A
        number on a schedule must not drive out plans; it is recorded again in a few steps' time.
        """
        recorded = [key for key, family in self.families.items() if family.row.how == "recorded"]
        return recorded[0] if len(recorded) > self.most // 2 else next(iter(self.families))

    def states(self) -> list[WatchedState]:
        """Return the states of the module that have plans."""
        return [key.state for key in self.families]

    def last_key(self) -> Key | None:
        """Return the key used last."""
        return next(reversed(self.families), None)

    def rows(self) -> PlanRows:
        """Return the report."""
        return PlanRows([family.row for family in self.families.values()])

    def __iter__(self) -> Iterator[Planned]:
        for family in self.families.values():
            yield from family.variants


_MOST_TRIES = 4  # to make a plan for all numbers


class AnyNumber:
    """Numbers of calls that a plan may leave open, without those that were tried in vain."""

    def __init__(self, plans: PlanStore) -> None:
        self._plans = plans
        self._tried: dict[Key | None, int] = {}  # failures, by key
        self._in_vain: dict[Place, int] = {}  # failures, by attribute

    def ints(self, key: Key) -> frozenset[int] | None:
        """Return the places of ints that differ from an earlier call's, if only numbers differ.

        None means that there is no such call, or that a general plan was tried in vain.
        """
        whole = self._plans.ints_unlike(key)
        if whole is None or self._tried.get(key.for_any_number(whole), 0) >= _MOST_TRIES:
            return None
        return whole

    def attributes(self, key: Key) -> tuple[tuple[Place, ...], frozenset[int]]:
        """Return the attributes and places of ints that differ, if only numbers differ.

        No attributes means that none differ, or that a general plan was tried in vain.
        """
        names, whole = self._plans.attributes_unlike(key)
        tries = max((self._in_vain.get(name, 0) for name in names), default=0)
        return ((), frozenset()) if tries >= _MOST_TRIES else (names, whole)

    def not_ints(self, general: Key) -> None:
        """Remember that the plan for a general key is not for all its numbers."""
        self._tried[general] = self._tried.pop(general, 0) + 1
        while len(self._tried) > self._plans.most:
            del self._tried[next(iter(self._tried))]

    def not_attributes(self, names: Sequence[Place]) -> None:
        """Remember that no plan leaves these attributes open."""
        self._in_vain.update((name, self._in_vain.get(name, 0) + 1) for name in names)
