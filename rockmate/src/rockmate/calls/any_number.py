"""For which calls a plan for any number is tried: not again and again where none can be."""

from __future__ import annotations

from collections.abc import Sequence

from rockmate.calls.plan_store import Key, PlanStore
from rockmate.guards.module_state import Place

_MOST_TRIES = 4  # to make a plan for all numbers


class AnyNumber:
    """Numbers that one of some plans may be for any of, by what was tried in vain."""

    def __init__(self, plans: PlanStore) -> None:
        self._plans = plans
        self._tried: dict[Key | None, int] = {}  # how often no plan could be for any number
        self._in_vain: dict[Place, int] = {}  # the same of an attribute

    def ints(self, key: Key) -> frozenset[int] | None:
        """Return which ints a call has otherwise than one that differs in numbers only.

        None where there is none before it, or where a plan for any number was tried in vain.
        """
        whole = self._plans.ints_unlike(key)
        if whole is None or self._tried.get(key.for_any_number(whole), 0) >= _MOST_TRIES:
            return None
        return whole

    def attributes(self, key: Key) -> tuple[tuple[Place, ...], frozenset[int]]:
        """Return which attributes and ints a call has otherwise, if it differs in numbers only.

        No attributes where there are none, or where a plan for any of them was tried in vain.
        """
        names, whole = self._plans.attributes_unlike(key)
        tries = max((self._in_vain.get(name, 0) for name in names), default=0)
        return ((), frozenset()) if tries >= _MOST_TRIES else (names, whole)

    def not_ints(self, general: Key) -> None:
        """Remember that a plan is not for all numbers of a key."""
        self._tried[general] = self._tried.pop(general, 0) + 1
        while len(self._tried) > self._plans.most:
            del self._tried[next(iter(self._tried))]

    def not_attributes(self, names: Sequence[Place]) -> None:
        """Remember that a plan is not for any number in the place of these attributes."""
        self._in_vain.update((name, self._in_vain.get(name, 0) + 1) for name in names)
