"""Places outside of a module whose value is another at every step: who reads them."""

from __future__ import annotations

from collections.abc import Collection

from rkgb.elements import is_inside
from rkgb.guards import Sources
from rockmate.keys.module_state import ModuleState

_MOST_VALUES = 4  # of one place, recorded one after the other
Fact = tuple[str, str, str]


class ChangingPlaces:
    """Counts for how many recordings in a row nothing was otherwise but the same places."""

    def __init__(self) -> None:
        self._values: dict[Fact, int] = {}
        self._left: set[str] = set()  # those whose readers cannot run whole, in words

    def note(self, now: ModuleState, then: ModuleState | None) -> list[Fact]:
        """Note a recording for `now` after one for `then`, None if more is otherwise than states.

        Returns the places that have had too many values.
        """
        facts = () if then is None else dict.fromkeys((*now.facts, *then.facts))
        differ = [f for f in facts if then is not None and now.facts.get(f) != then.facts.get(f)]
        if not all(what == "source" for _, what, _ in differ):
            differ = []
        self._values = {fact: self._values.get(fact, 0) + 1 for fact in differ}
        return [f for f, n in self._values.items() if n >= _MOST_VALUES and f[0] not in self._left]

    def leave(self, facts: Collection[Fact]) -> None:
        """Ask no more for the readers of these places: they cannot run whole."""
        self._left |= {told for told, _, _ in facts}


def readers(facts: Collection[Fact], sources: Sources) -> tuple[str, ...]:
    """Return the outermost submodules whose Python reads places."""
    keys = list(sources.places)
    paths = {path for _, _, number in facts for path in sources.paths[keys[int(number)]]}
    return tuple(p for p in sorted(paths) if not any(p != q and is_inside(p, q) for q in paths))
