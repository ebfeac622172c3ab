"""The choice of numbers for which a general plan is tried; a few failures end the tries."""

from __future__ import annotations

from collections.abc import Sequence

from rockmate.calls.plan_store import Key, PlanStore
from rockmate.guards.module_state import Place

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
