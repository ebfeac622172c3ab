"""Comparisons by identity of what is outside of a module with what it holds, or is given.

A recording runs a copy of the module on other tensors than the user's. Where no copies can be lent
to what is outside (`Contents`), whether an attribute is the object that is held there would always
be no. What may ask that runs whole, on the user's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from rkgb.guards.code_watch import Seen
from rkgb.guards.loads import ANY, EQUALS, IN, IS, loads_of
from rkgb.guards.sources import Sources
from rkgb.outside.reached import Reached

_SEARCHED = (list, tuple, deque)


def identity(value: Any) -> int:
    """Return what tells an object from others; a view of a module is the module."""
    is_module = issubclass(type(value), nn.Module)  # not `isinstance`, which asks objects
    return id(vars(value).get("_modules", value) if is_module else value)


def identities_asked(
    seen: Iterable[Seen],
    copies: Mapping[int, Any],
    inside: Collection[int],
    own: Collection[int],
    is_own: Callable[[Any, Collection[int]], bool],
) -> Iterator[tuple[str, str]]:
    """Yield the submodules whose functions compare so, each with the words for it.

    `copies` are the originals of what the module holds, by the identity of their copies, and `own`
    what tells these originals from others. Of what `is_own`, a copy would be another object.
    """
    for one in seen:
        asks = loads_of(one.code).compares
        for source in _sources(one, copies).places.values() if asks else ():
            reached = Reached(frozenset(loads_of(one.code).attributes), inside)
            reached.add(value := source.read())
            held = (value, *reached.closed, *reached.owners.values())
            if (
                (IS in asks and any(is_own(v, own) for v in held))
                or (IN in asks and any(_holds(v, own) for v in held))
                or (EQUALS in asks and isinstance(source.owner, dict) and identity(value) in own)
            ):
                yield max(one.paths), f"may compare its own with what {source.named} leads to"
                break


def set_and_read(
    seen: Iterable[Seen],
    copies: Mapping[int, Any],
    inside: Collection[int],
    own: Mapping[int, Collection[str]],
) -> Iterator[tuple[str, str]]:
    """Yield submodules whose functions may read what is set on their own, by way of outside.

    `own` are the modules on which attributes are set, by the identity of the originals.
    """
    for one in seen:
        names = {*loads_of(one.code).attributes, *one.names}
        for source in _sources(one, copies).places.values():
            reached = Reached(frozenset(names), inside)
            reached.add(source.read())
            for module in reached.closed:
                for name in own.get(identity(module), ()):
                    if name in names or ANY in names:
                        yield max(one.paths), f"sets '{name}', and may read it by {source.named}"


def _sources(one: Seen, copies: Mapping[int, Any]) -> Sources:
    return Sources.of([one], copies, are_known=True)


def _holds(value: Any, own: Collection[int]) -> bool:
    return type(value) in _SEARCHED and any(identity(item) in own for item in value)
