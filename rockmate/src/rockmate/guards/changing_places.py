"""Places outside of a module whose value changes at every step, and which submodules read them."""

from __future__ import annotations

from collections.abc import Collection

from rkgb.elements import outermost
from rkgb.guards import Sources
from rockmate.guards.module_state import WatchedState

_MOST_VALUES = 4  # of one place, in successive recordings
Fact = tuple[str, str, str]


class ChangingPlaces:
    """Counts how many recordings in a row were made only because the same places had changed."""

    def __init__(self) -> None:
        self._values: dict[Fact, int] = {}
        self._left: set[str] = set()  # places, in words, whose readers cannot be opaque calls

    def note(self, now: WatchedState, then: WatchedState | None) -> list[Fact]:
        """Note a recording for the state `now` after one for `then`.

        `then` is None if more than the state differs. Returns the places with too many values.
        """
        facts = () if then is None else dict.fromkeys((*now.facts, *then.facts))
        differ = [f for f in facts if then is not None and now.facts.get(f) != then.facts.get(f)]
        if not all(what == "source" for _, what, _ in differ):
            differ = []
        self._values = {fact: self._values.get(fact, 0) + 1 for fact in differ}
        return [f for f, n in self._values.items() if n >= _MOST_VALUES and f[0] not in self._left]

    def leave(self, facts: Collection[Fact]) -> None:
        """Stop returning these places, because their readers cannot be opaque calls."""
        self._left |= {told for told, _, _ in facts}


def readers(facts: Collection[Fact], sources: Sources) -> tuple[str, ...]:
    """Return the outermost submodules whose Python reads these places."""
    keys = list(sources.places)
    paths = {path for _, _, number in facts for path in sources.paths[keys[int(number)]]}
    return outermost(sorted(paths))
