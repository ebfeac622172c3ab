"""Comparisons by identity of what is outside of a module with what it holds, or is given.

A recording runs a copy of the module on other tensors than the user's. So whether an attribute is
the object that a global variable holds, or whether a list outside has it, would always be no. What
may ask that runs whole, on the user's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from rkgb.guards.code_watch import Seen
from rkgb.guards.contents import Reached
from rkgb.guards.loads import EQUALS, IN, IS, loads_of
from rkgb.guards.sources import Sources

_SEARCHED = (list, tuple, deque)


def identities_asked(
    seen: Iterable[Seen], copies: Mapping[int, Any], inside: Collection[int]
) -> Iterator[tuple[str, str]]:
    """Yield the submodules whose functions compare so, each with the words for it.

    `copies` are the originals of what the module holds, by the identity of their copies.
    """
    own = frozenset(map(id, copies.values()))
    for one in seen:
        asks = loads_of(one.code).compares
        for source in _sources(one, copies).places.values() if asks else ():
            reached = Reached(frozenset(loads_of(one.code).attributes), inside)
            reached.add(value := source.read())
            held = (value, *reached.closed, *reached.owners.values())
            if (
                (IS in asks and any(isinstance(v, Tensor) or id(v) in own for v in held))
                or (IN in asks and any(_holds(v, own) for v in held))
                or (EQUALS in asks and isinstance(source.owner, dict) and id(value) in own)
            ):
                yield max(one.paths), f"may compare its own with what {source.named} leads to"
                break


def _sources(one: Seen, copies: Mapping[int, Any]) -> Sources:
    return Sources.of([one], copies, are_known=True)


def _holds(value: Any, own: Collection[int]) -> bool:
    return type(value) in _SEARCHED and any(id(item) in own for item in value)
