"""Entries of a dict that count (attributes, variables): looked at again after a write only."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import chain, pairwise, repeat
from operator import attrgetter, is_
from types import CellType, MappingProxyType
from typing import Any

from torch import Tensor

from rkgb.torch_api import items_of_all
from rkgb.torch_api.patches import meant

ABSENT: Any = object()  # in a place that holds nothing


class Entries:
    """The entries of a dict that count: the same objects by these names, and nothing by others."""

    __slots__ = ("_absent", "_checks", "_found", "_names", "table")

    def __init__(self, table: dict[Any, Any]) -> None:
        self.table = table
        self._names: list[Any] = []
        self._found: list[Any] = []
        self._absent: frozenset[Any] = frozenset()
        self._checks: list[Callable[[], bool]] = []  # of all that it holds

    def note(self, name: Any, value: Any) -> None:
        """Look from now on whether it holds the same object by this name, or nothing still."""
        if value is ABSENT:
            self._absent |= {name}
        elif isinstance(value, Tensor):  # not kept alive; that it lives is checked beside this
            known = id(value)
            self._checks.append(lambda: id(self.table.get(name)) == known)
        else:
            self.note_alive(name, value)

    def note_alive(self, name: Any, value: Any) -> None:
        """Do the same, and keep the object alive."""
        self._names.append(name)
        self._found.append(value)

    def note_absent(self, names: frozenset[Any]) -> None:
        """Look from now on whether it has none still of the names that it has not."""
        self._absent |= names - self.table.keys()

    def add_check(self, check: Callable[[], bool]) -> None:
        """Ask this too after a write."""
        self._checks.append(check)

    def hold(self) -> bool:
        """Whether everything is as it was."""
        return (
            self._holds_the_same()
            and all(self.get(name) is ABSENT for name in self._absent.intersection(self.table))
            and all(check() for check in self._checks)
        )

    def get(self, name: Any) -> Any:
        """Return what it holds by a name, whatever stands there for a while; or `ABSENT`."""
        return meant(dict.get(self.table, name, ABSENT), ABSENT)

    def _holds_the_same(self) -> bool:
        found = map(dict.get, repeat(self.table), self._names, repeat(ABSENT))
        return all(map(is_, found, self._found)) or all(
            map(is_, map(self.get, self._names), self._found)
        )


class Attribute:
    """An attribute of many objects that are no dicts' own: the same object in each."""

    __slots__ = ("_owners", "_read", "_values", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._read = attrgetter(name)
        self._owners: list[Any] = []
        self._values: list[Any] = []

    def note(self, owner: Any, value: Any) -> None:
        """Look from now on whether this object has the same value by the name."""
        self._owners.append(owner)
        self._values.append(value)

    def holds(self) -> bool:
        """Whether everything is as it was."""
        try:
            return all(map(is_, map(self._read, self._owners), self._values))
        except (AttributeError, ValueError):  # it is gone; ValueError of a cell
            return False

    def pairs(self) -> list[tuple[Any, str]]:
        """Return the objects, each with the name."""
        return [(owner, self.name) for owner in self._owners]


class Items:
    """What many lists and sets hold: the same objects in the same places."""

    __slots__ = ("_are_still", "_containers", "_counts", "_known", "empty")

    def __init__(self) -> None:
        self.empty: list[list[Any] | set[Any]] = []  # most are
        self._containers: list[list[Any] | set[Any]] = []
        self._counts: list[int] = []
        self._known: list[Any] = []
        self._are_still: Callable[[], bool] | None = None  # a quick look at all of them

    def note(self, container: list[Any] | set[Any]) -> None:
        """Look from now on whether this container holds the same."""
        if not container:
            self.empty.append(container)
            return
        self._containers.append(container)
        self._counts.append(len(container))
        self._known += container

    def hold(self) -> bool:
        """Whether everything is as it was in those that are not `empty`."""
        if self._are_still is not None and self._are_still():
            return True
        if self._are_still is None:  # before the look, so that it says the same
            self._are_still = items_of_all(self._containers)
        if [*map(len, self._containers)] != self._counts:
            return False
        return all(map(is_, chain.from_iterable(self._containers), self._known))


def cell_content(cell: CellType) -> Any:
    """Return what a variable of a function around holds, or `ABSENT`."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def dict_behind(view: Any) -> dict[Any, Any]:
    """Return the dict that a proxy or a view shows, such as the attributes of a class."""
    (found,) = (held for held in gc.get_referents(view) if isinstance(held, dict))
    return found


def remembered(cached: Any) -> tuple[dict[Any, Any], list[Any]]:
    """Return the results of a function that remembers them: by key as it keeps them, and as such.

    One that remembers all has the results in its dict, another has links to them.
    """
    held, own = gc.get_referents(cached), attributes_of(cached)
    table = next(one for one in reversed(held) if type(one) is dict and one is not own)
    after = {id(one): following for one, following in pairwise(held)}
    links = "_lru_list_elem"
    return table, [
        after[id(key)] if type(held).__name__ == links else held for key, held in table.items()
    ]


def attributes_of(value: Any) -> dict[Any, Any] | None:
    """Return the attributes that an object or a class has for itself, as the dict that they are."""
    table = getattr(value, "__dict__", None)
    if isinstance(table, MappingProxyType):
        return dict_behind(table)
    return table if isinstance(table, dict) else None
