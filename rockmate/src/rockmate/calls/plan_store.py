"""The plans of one module by key; the one used least recently goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rockmate.guards.input_signature import for_any_number, other_ints, told, unlike
from rockmate.guards.module_state import ModuleState, Place
from rockmate.reports.in_full import InFull

if TYPE_CHECKING:
    from rockmate.networks import Planned


_MOST_WHOLE = 4  # places of ints that are looked at where a key is unknown


@dataclass(frozen=True, slots=True)
class Key:
    """What a plan takes for granted."""

    state: ModuleState
    inputs: Hashable
    autocast: Hashable
    flags: Hashable

    def __hash__(self) -> int:  # flags hardly ever change
        return hash((id(self.state), self.inputs))

    def for_any_number(self, whole: Collection[int] = ()) -> Key | None:
        """Return the key of calls that differ in floats, and in the ints in `whole`, only.

        None where there are no such numbers.
        """
        inputs = for_any_number(self.inputs, whole)
        return None if inputs is None else replace(self, inputs=inputs)

    def unlike(self, other: Key) -> str:
        """Say in words what is otherwise here than in `other`."""
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
    """One plan in the report: for what calls, why it was made, how long that took."""

    what: str  # the inputs
    why: str
    how: str  # "planned"; "recorded": another plan's steps served; "resized" from other plans
    seconds: float
    peak_bytes: int  # predicted
    budget_bytes: int
    overhead: float  # what is computed again, as a share of the plain step's time

    def __str__(self) -> str:
        return (
            f"{self.how} in {self.seconds:.1f} s, peak {self.peak_bytes} of {self.budget_bytes} "
            f"bytes, {100 * self.overhead:.1f} % computed again: {self.what} ({self.why})"
        )


class PlanRows(tuple[PlanRow, ...], InFull):
    """The plans that are kept, the one used last at the end; printing it shows a line for each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    __repr__ = __str__


@dataclass
class Family:
    """The plans for calls of one key.

    Most keys have one. Where a forward looks at values of its inputs, there is one for each way
    that these have led it; the one used last comes first.
    """

    variants: list[Planned]
    row: PlanRow
    looks: int = 1  # how many of the next calls are recorded once more, to compare

    def made_of(self, chosen: Callable[[Planned], Planned]) -> Family:
        """Return a family of what is chosen for each plan."""
        return replace(self, variants=[chosen(planned) for planned in self.variants])

    def takes(self, leaves: Sequence[Any]) -> bool:
        """Whether a plan for any number is for a call with these leaves; it comes first then."""

        def serves(planned: Planned) -> bool:
            return planned.numbers is not None and planned.numbers.of(leaves) is not None

        return self._first(serves) is not None

    def fitting(self, look_up: Callable[[Planned], Mapping[str, Tensor]]) -> Planned | None:
        """Return the plan whose recording has seen what this call would see.

        `look_up` gives the values that exist before a step of a plan.
        """
        return self._first(lambda planned: planned.outcomes.hold(look_up(planned)))

    def _first(self, fits: Callable[[Planned], bool]) -> Planned | None:
        """Return the first variant that fits, which comes first from now on."""
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
        self._last: tuple[Key, Family] | None = None  # which most calls ask for again
        self._whole: list[frozenset[int]] = [
            frozenset()
        ]  # places of ints that plans are for any of

    def get(self, key: Key) -> Family | None:
        """Return the family of a key, which has been used last from now on."""
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        family = self.families.get(key)
        if family is not None:
            self.families.move_to_end(key)
            self._last = key, family
        return family

    def for_any_number(self, key: Key, leaves: Sequence[Any]) -> Family | None:
        """Return the family of a key whose numbers are those of no plan, if one is for any."""
        for whole in self._whole:
            general = key.for_any_number(whole)
            family = None if general is None else self.get(general)
            if family is not None and family.takes(leaves):
                return family
        return None

    def ints_unlike(self, key: Key) -> frozenset[int] | None:
        """Return where calls that differ from a key's in numbers only have other ints.

        None where there is no plan for such.
        """
        for other in reversed(self.families):
            if replace(other, inputs=key.inputs) == key:
                whole = other_ints(key.inputs, other.inputs)
                if whole is not None and key.for_any_number(whole) is not None:
                    return whole
        return None

    def attributes_unlike(self, key: Key) -> tuple[tuple[Place, ...], frozenset[int]]:
        """Return which attributes and ints are others in a key than in one that differs in numbers.

        No attributes where there is no plan for such a key.
        """
        for other in reversed(self.families):
            if other.autocast == key.autocast and other.flags == key.flags:
                names = key.state.numbers_unlike(other.state)
                whole = other_ints(key.inputs, other.inputs)
                if names and whole is not None:
                    return names, whole
        return (), frozenset()

    def look_for(self, whole: frozenset[int]) -> None:
        """Look from now on for plans that are for any ints in these places."""
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
        """Drop plans, and families that have none left."""
        self._last = None
        for key, family in list(self.families.items()):
            family.variants = [planned for planned in family.variants if not is_wrong(planned)]
            if not family.variants:
                del self.families[key]

    def _least_missed(self) -> Key:
        """Return the key used least recently.

        Where more than half only differ in numbers from others, it is one of those: a number on a
        schedule must not drive plans out, and is recorded again in the time of a few steps.
        """
        recorded = [key for key, family in self.families.items() if family.row.how == "recorded"]
        return recorded[0] if len(recorded) > self.most // 2 else next(iter(self.families))

    def states(self) -> list[ModuleState]:
        """Return the states of the module that plans are for."""
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


def what(key: Key) -> str:
    """Return in words what calls a key is for."""
    return told(key.inputs)
