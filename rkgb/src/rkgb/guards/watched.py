"""What a value counts as, and whether it is the same still.

Numbers, flags, text and the containers of them count by value. An object that holds nothing else,
such as a configuration, counts by the values in it. Other objects and modules of Python count by
identity, and by what their attributes hold that the forward's Python asks for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from operator import is_
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.guards.entries import ABSENT, Entries, attributes_of, dict_behind
from rkgb.guards.holding import (
    CONTAINERS,
    LONG,
    OBJECTS,
    PLAIN,
    VIEWS,
    bytes_of,
    identical,
    is_record,
    is_still,
    items_of,
    keeps_to_itself,
    slots_of,
)
from rkgb.guards.owners import is_users

_DEPTH, _DEEP = 4, 100  # of containers and objects in each other: of what nobody reads, and others
_MOST = 100_000  # items and bytes of one that are looked at; of what nobody reads `LONG`


@dataclass(frozen=True, slots=True)
class Same:
    """An object that counts by identity; it is kept alive, so that no other gets its place."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that is kept anywhere but in a table of a module: which one, and of what kind.

    Steps read its content anew. The same number in two places is one tensor in both.
    """

    number: int
    kind: Hashable


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of a module, which has another place as well."""

    path: str


class Watched:
    """What values count as; looks at them again: the same things in the same places still?

    `asked` are names of attributes: others of an object that counts by identity are not looked at.
    Of `modules` and tensors that are `named`, others look at what they hold.
    """

    def __init__(
        self,
        asked: frozenset[str] = frozenset(),
        modules: Container[int] = frozenset(),
        named: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.asked = asked
        self.checks: list[Callable[[], bool]] = []
        self.where = ""  # what is looked at now, in words
        self.is_read = True  # by Python of the user: it is followed as far as it leads
        self._modules, self._named = modules, named  # that are known by their path, by identity
        self.outside: list[tuple[str, nn.Module]] = []  # modules that are not: where, and which
        # Not kept alive: what a step keeps for the next one may be replaced there.
        self.tensors: list[weakref.ref[Tensor]] = []
        self._kinds: list[Hashable] = []
        self._numbers: dict[int, int] = {}  # of tensors, by identity
        self._entries: dict[int, Entries] = {}  # by the identity of the dict
        self._objects: list[Any] = []  # whose classes and attributes may be exchanged
        self._classes: list[type] = []
        # What is watched already: a configuration is an attribute of every module of its model.
        # Each is kept alive, so that no other gets its place.
        self._known: dict[tuple[int, bool], tuple[Any, Hashable]] = {}

    @property
    def tables(self) -> list[dict[Any, Any]]:
        """The dicts that are looked at again only after somebody has written to them."""
        return [entries.table for entries in self._entries.values()]

    def holds(self, written: Iterable[Mapping[Any, Any]] | None = None) -> bool:
        """Whether everything is as it was, where of the tables at most these were written to."""
        for table in self.tables if written is None else written:
            entries = self._entries.get(id(table))
            if entries is not None and not entries.hold():
                return False
        if self.tensors and [_kind(ref()) for ref in self.tensors] != self._kinds:
            return False
        if self._objects and not all(map(is_, map(type, self._objects), self._classes)):
            return False
        return all(check() for check in self.checks)

    def entries(self, table: dict[Any, Any]) -> Entries:
        """Return what counts of a dict."""
        entries = self._entries.get(id(table))
        if entries is None:
            entries = self._entries[id(table)] = Entries(table)
        return entries

    def worth(self, value: Any, depth: int = 0) -> Hashable:
        """Return what a value counts as, and watch what it holds."""
        kind = type(value)
        if kind is float or (isinstance(value, float) and attributes_of(value) is None):
            return kind, value.hex()  # 0.0 is not -0.0, and nan is nan
        if kind in PLAIN:
            return kind, value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            if id(value) not in self._modules:
                self.outside.append((self.where, value))
            return Same(value)
        if depth >= (_DEEP if self.is_read else _DEPTH) or isinstance(value, OBJECTS):
            return Same(value)
        if isinstance(value, MethodType):
            return Same(value.__func__), self.worth(value.__self__, depth)
        place = id(value), self.is_read
        if place not in self._known:
            self._known[place] = value, Same(value)  # where it leads back to itself
            self._known[place] = value, self._followed(value, depth)
        return self._known[place][1]

    def _tensor(self, value: Tensor) -> Hashable:
        path = self._named.get(id(value))
        if path is not None:
            return Named(path)
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(weakref.ref(value))
            self._kinds.append(_kind(value))
        return Kept(number, self._kinds[number])

    def _followed(self, value: Any, depth: int) -> Hashable:
        kind = type(value)
        if isinstance(value, partial):
            parts = (value.func, value.args, value.keywords)
            return kind, tuple(self.worth(part, depth + 1) for part in parts)
        if isinstance(value, CONTAINERS):
            content = self._container(value, depth)
            plain = kind in CONTAINERS or not attributes_of(value)
            return content if plain else (content, *self._attributes(value, depth))
        if is_record(value, _DEPTH - depth):
            self._note_class(value)
            found = self._of_classes(value, depth) if self.asked else []
            return (Same(kind), self._container(vars(value), depth), *found)
        if isinstance(value, VIEWS):
            return Same(value), self._container(dict_behind(value), depth)
        if isinstance(value, ContextVar):
            held = value.get(ABSENT)
            self.checks.append(lambda: value.get(ABSENT) is held)
            return Same(value), self.worth(held, depth + 1)
        content = bytes_of(value, _MOST if self.is_read else LONG)
        if content is not None:
            self.checks.append(lambda: bytes_of(value, _MOST) == content)
            return Same(value), content
        return self._object(value, depth)

    def _container(self, value: Any, depth: int) -> Hashable:
        kind, items = type(value), items_of(value)
        if isinstance(value, tuple):
            return kind, tuple(self.worth(item, depth + 1) for item in items)
        if isinstance(value, frozenset):
            return kind, frozenset(self.worth(item, depth + 1) for item in items)
        if len(items) > (_MOST if self.is_read else LONG):
            count = len(items)
            self._look(value, lambda: len(items_of(value)) == count)
            return Same(value), count
        has_tensors = any(isinstance(item, Tensor) for item in items)
        if not has_tensors:
            self._look(value, partial(is_still, value, items))
        elif isinstance(value, set):  # which comes first is nobody's to say
            self._look(value, partial(is_still, value, items))
            return Same(value), *map(Same, items)
        else:
            known = [weakref.ref(i) if isinstance(i, Tensor) else i for i in items]
            self._look(value, lambda: identical(items_of(value), known))
        worth = [self.worth(item, depth + 1) for item in items]
        return kind, frozenset(worth) if isinstance(value, set) else tuple(worth)

    def _look(self, value: Any, check: Callable[[], bool]) -> None:
        """Look from now on at a container: at a dict after a write, at others always."""
        if isinstance(value, dict):
            self.entries(value).add_check(check)
        else:
            self.checks.append(check)

    def _object(self, value: Any, depth: int) -> Hashable:
        """Return what an object counts as: itself, and its attributes that are asked for."""
        found = [*self._attributes(value, depth), *self._of_classes(value, depth)]
        self._note_class(value)
        return (Same(value), *found) if found else Same(value)

    def _note_class(self, value: Any) -> None:
        kind = type(value)
        if is_users(kind.__module__) and not isinstance(value, type):
            self._objects.append(value)
            self._classes.append(kind)
            table = attributes_of(value)
            if table is not None:
                self.checks.append(lambda: attributes_of(value) is table)

    def _attributes(self, value: Any, depth: int) -> list[Hashable]:
        if isinstance(value, type) and not is_users(value.__module__):
            return []
        table, found = attributes_of(value), list[Hashable]()
        if table is not None and (table or not isinstance(value, FunctionType)):
            entries, names = self.entries(table), self.asked & table.keys()
            if self.is_read and keeps_to_itself(value):
                names = frozenset(table)  # its own Python reads them
            for name in sorted(names):
                entries.note(name, table[name])
                found.append((name, self.worth(table[name], depth + 1)))
            entries.note_absent(self.asked)
        for name in self.asked.intersection(slots_of(type(value))):
            held = getattr(value, name, ABSENT)
            self.checks.append(partial(_holds_in_slot, value, name, held))
            found.append((name, self.worth(held, depth + 1)))
        return found

    def _of_classes(self, value: Any, depth: int) -> list[Hashable]:
        kinds = type(value).__mro__
        if isinstance(value, type):
            kinds = (*value.__mro__[1:], *kinds)
        return [self.of_class(kind, depth) for kind in kinds if is_users(kind.__module__)]

    def of_class(self, kind: type, depth: int = 0) -> Hashable:
        """Return what a class counts as: itself, and its attributes that are asked for."""
        place = id(kind), True
        if place not in self._known:
            self._known[place] = kind, Same(kind)
            bases = kind.__bases__
            self.checks.append(lambda: kind.__bases__ == bases)
            self._known[place] = kind, (Same(kind), *self._attributes(kind, depth))
        return self._known[place][1]


def _kind(tensor: Tensor | None) -> Hashable:
    """Return what a plan takes for granted of a tensor; None if it is gone."""
    if tensor is None:
        return None
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    wants = tensor.requires_grad, tensor.is_inference()
    is_lazy = tensor.is_conj(), tensor.is_neg()
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, strides, wants, is_lazy


def _holds_in_slot(value: Any, name: str, held: Any) -> bool:
    return getattr(value, name, ABSENT) is held
