"""What a forward may read outside of its module, to be read as it was by a second run of a part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import nn

from rkgb.guards.code_watch import Seen
from rkgb.guards.owners import is_users
from rkgb.guards.sources import Sources, look_up, unbound
from rkgb.outside.contents import Contents
from rkgb.outside.held import OF_MODULE
from rkgb.outside.reached import Reached


class Readable:
    """The places outside that a forward may read: these, and what the classes lead to."""

    def __init__(self, sources: Sources, kinds: Iterable[type] = ()) -> None:
        self._asked, self._kinds = sources.attributes, [*kinds]
        self._sources = [
            source
            for source in sources.places.values()
            if isinstance(source.owner, CellType) or _is_users_own(source.owner)
        ]

    @classmethod
    def led_to(
        cls, seen: Iterable[Seen], copies: Mapping[int, Any], modules: Iterable[nn.Module]
    ) -> Readable:
        """Return what functions that ran may read, and those that they lead to.

        What the attributes of these modules hold counts as led to.
        """
        held = [v for m in modules for n, v in vars(m).items() if n not in OF_MODULE]
        known = {id(one.code): one for one in seen}
        kinds = {
            base: None for one in known.values() for kind in one.owners for base in kind.__mro__
        }
        own = [kind for kind in kinds if is_users(kind.__module__)]
        everywhere = _LedTo((*own, *held))
        following = [*known.values()]
        looked_up = 0
        for place, one in enumerate(following):  # grows while it is followed
            if place == looked_up:  # at once: each look-up goes through all that Python keeps
                looked_up = len(following)
                look_up(following[place:], copies)
            sources = Sources.of([one], copies, are_known=True)
            for function in (*everywhere.functions, *everywhere.led_to(sources)):
                if id(function.__code__) not in known:
                    more = Seen(function.__code__, function.__globals__, {*one.paths})
                    known[id(more.code)] = more
                    following.append(more)
            everywhere.functions.clear()
        return cls(Sources.of(following, copies, are_known=True), own)

    def now(self) -> Contents:
        """Return what is there, with copies of what changes by being used, for a second run."""
        contents, reached = Contents(), Reached(self._asked)
        for source in self._sources:
            contents.add(source.owner, source.name or None, lends=False, keeps=True)
            reached.add_named(source.told, source.read())
        for kind in self._kinds:
            reached.add(kind)
        for owner in reached.owners.values():
            contents.add(owner, lends=False, keeps=True)
        contents.tensors = reached.tensors
        return contents


class _LedTo:
    """What some objects lead to, walked once for all functions that may ask for attributes."""

    def __init__(self, values: Iterable[Any]) -> None:
        reached = Reached(frozenset())
        for value in values:
            reached.add(value)
        every = reached.owners.values()
        self.functions = [owner for owner in every if isinstance(owner, FunctionType)]
        self._named: dict[str, list[tuple[Any, Any]]] = {}  # of classes and modules
        for owner in every:
            for name, value in vars(owner).items() if isinstance(owner, _ASKED) else ():
                self._named.setdefault(name, []).append((owner, value))

    def led_to(self, sources: Sources) -> Iterator[FunctionType]:
        """Yield the functions to which places lead, and attributes of these names."""
        asked = sources.attributes
        named = [pair for name in asked & self._named.keys() for pair in self._named[name]]
        reached = Reached(asked)
        for value in (*(s.read() for s in sources.places.values()), *(v for _, v in named)):
            reached.add(value)
        for owner in reached.owners.values():
            if isinstance(owner, FunctionType):
                yield owner
            elif isinstance(owner, type):
                named += ((owner, vars(owner)[name]) for name in asked & vars(owner).keys())
        for owner, value in named:
            function = unbound(value) if isinstance(owner, type) else None
            if isinstance(function, FunctionType):
                yield function


_ASKED = (type, ModuleType)  # of which only attributes count that are asked for


def _is_users_own(table: Any) -> bool:
    return isinstance(table, dict) and "__name__" in table and is_users(table["__name__"])
