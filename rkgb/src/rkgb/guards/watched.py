"""What a value counts as, and whether it is the same still.

Numbers, flags, text and the containers of them count by value. An object that holds nothing else,
such as a configuration, counts by the values in it. Other objects and modules of Python count by
identity, and by what their attributes hold that the forward's Python asks for.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import getitem, is_
from types import FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.guards.owners import is_users

_PLAIN = (type(None), bool, int, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_OBJECTS = (FunctionType, torch.layout, torch.memory_format)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_DEPTH = 4  # of containers and objects in each other
_LONG = 512  # of longer containers only the length and the identity count: vocabularies, data


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


# In which table, by what name, and what it was.
_Rows = tuple[list[Mapping[Any, Any]], list[Any], list[Any]]


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
        self._modules, self._named = modules, named  # that are known by their path, by identity
        self.outside: list[tuple[str, nn.Module]] = []  # modules that are not: where, and which
        # Not kept alive: what a step keeps for the next one may be replaced there.
        self.tensors: list[weakref.ref[Tensor]] = []
        self._kinds: list[Hashable] = []
        self._numbers: dict[int, int] = {}  # of tensors, by identity
        # What is found again by name.
        self._rows: _Rows = [], [], []
        self._known_rows: dict[int, _Rows] = {}  # where others know of writes, by table
        # What is watched already: a configuration is an attribute of every module of its model.
        self._known: dict[tuple[int, int], Hashable] = {}

    def know(self, tables: Iterable[Mapping[Any, Any]]) -> None:
        """Let what is in these tables be passed over where others know that it is as it was."""
        others: _Rows = [], [], []
        self._known_rows = {id(table): ([], [], []) for table in tables}
        for row in zip(*self._rows, strict=True):
            for column, part in zip(self._known_rows.get(id(row[0]), others), row, strict=True):
                column.append(part)
        self._rows = others

    def holds(self, written: Iterable[Mapping[Any, Any]] = ()) -> bool:
        """Whether everything is as it was; no exception and no new object in the usual case.

        Of the tables that are known, the `written` ones are looked at.
        """
        try:
            for owners, names, found in (self._rows, *(self._known_rows[id(t)] for t in written)):
                if not all(map(is_, map(getitem, owners, names), found)):
                    return False
        except KeyError:  # it was deleted
            return False
        if self.tensors and [_kind(ref()) for ref in self.tensors] != self._kinds:
            return False
        return all(check() for check in self.checks)

    def note(self, table: Mapping[Any, Any], name: Any, value: Any) -> None:
        """Look from now on whether a table holds the same object by this name."""
        if isinstance(value, Tensor):  # it is not kept alive; that it lives is checked beside this
            known = id(value)
            self.checks.append(lambda: id(table.get(name)) == known)
            return
        self.note_alive(table, name, value)

    def note_alive(self, table: Mapping[Any, Any], name: Any, value: Any) -> None:
        """Do the same, and keep the object alive."""
        for column, part in zip(self._rows, (table, name, value), strict=True):
            column.append(part)

    def worth(self, value: Any, depth: int = 0) -> Hashable:
        """Return what a value counts as, and watch what it holds."""
        kind = type(value)
        if isinstance(value, float):
            return kind, value.hex()  # 0.0 is not -0.0, and nan is nan
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            if id(value) not in self._modules:
                self.outside.append((self.where, value))
            return Same(value)
        if depth >= _DEPTH or isinstance(value, _OBJECTS):
            return Same(value)
        if isinstance(value, MethodType):
            return Same(value.__func__), self.worth(value.__self__, depth)
        if isinstance(value, partial):
            parts = (value.func, value.args, value.keywords)
            return kind, tuple(self.worth(part, depth + 1) for part in parts)
        if isinstance(value, _CONTAINERS) and not hasattr(value, "_fields"):
            return self._container(value, depth)
        if _is_record(value, _DEPTH - depth):
            found = self._of_classes(value, depth) if self.asked else []
            return (Same(kind), self._container(vars(value), depth), *found)
        if isinstance(value, tuple):
            return self._container(value, depth)
        if kind.__module__ == "numpy" and getattr(value, "nbytes", _LONG + 1) <= _LONG:
            content = value.tobytes()
            self.checks.append(lambda: bool(value.tobytes() == content))
            return Same(value), content
        return self._object(value, depth)

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

    def _container(self, value: Any, depth: int) -> Hashable:
        kind, items = type(value), _items(value)
        if isinstance(value, tuple):
            return kind, tuple(self.worth(item, depth + 1) for item in items)
        if isinstance(value, frozenset):
            return kind, frozenset(self.worth(item, depth + 1) for item in items)
        place = id(value), depth  # a check keeps it alive, so that no other gets its place
        if place not in self._known:
            self._known[place] = self._watched(value, items, depth)
        return self._known[place]

    def _watched(self, value: Any, items: list[Any], depth: int) -> Hashable:
        """Return what a container that may change counts as, and look at it again from now on."""
        kind, count = type(value), len(items)
        if count > _LONG:
            self.checks.append(lambda: len(_items(value)) == count)
            return Same(value), count
        if any(isinstance(item, Tensor) for item in items):
            if isinstance(value, set):  # which comes first is nobody's to say
                self.checks.append(partial(_is_still, value, items))
                return Same(value), *map(Same, items)
            known = [weakref.ref(i) if isinstance(i, Tensor) else i for i in items]
            self.checks.append(lambda: _identical(_items(value), known))
        else:
            self.checks.append(partial(_is_still, value, items))
        worth = [self.worth(item, depth + 1) for item in items]
        return kind, frozenset(worth) if isinstance(value, set) else tuple(worth)

    def _object(self, value: Any, depth: int) -> Hashable:
        """Return what an object counts as: itself, and its attributes that are asked for."""
        place = id(value), depth
        if place not in self._known:
            found = [*self._attributes(value, depth), *self._of_classes(value, depth)]
            self._known[place] = (Same(value), *found) if found else Same(value)
        return self._known[place]

    def _attributes(self, value: Any, depth: int) -> list[Hashable]:
        table = getattr(value, "__dict__", None)
        if isinstance(value, ModuleType) and not is_users(value.__name__):
            return []
        if isinstance(value, type) and not is_users(value.__module__):
            return []
        found: list[Hashable] = []
        if isinstance(table, Mapping):
            for name in sorted(self.asked & table.keys()):
                self.note(table, name, table[name])
                found.append((name, self.worth(table[name], depth + 1)))
        for name in self.asked.intersection(_slots(type(value))):
            held = getattr(value, name, None)
            self.checks.append(partial(_holds_in_slot, value, name, held))
            found.append((name, self.worth(held, depth + 1)))
        return found

    def _of_classes(self, value: Any, depth: int) -> list[Hashable]:
        kinds = value.__mro__[1:] if isinstance(value, type) else type(value).__mro__
        return [self.of_class(kind, depth) for kind in kinds if is_users(kind.__module__)]

    def of_class(self, kind: type, depth: int = 0) -> Hashable:
        """Return what a class counts as: itself, and its attributes that are asked for."""
        place = id(kind), depth
        if place not in self._known:
            self._known[place] = (Same(kind), *self._attributes(kind, depth))
        return self._known[place]


def _kind(tensor: Tensor | None) -> Hashable:
    """Return what a plan takes for granted of a tensor; None if it is gone."""
    if tensor is None:
        return None
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    wants = tensor.requires_grad, tensor.is_inference()
    is_lazy = tensor.is_conj(), tensor.is_neg()
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, strides, wants, is_lazy


def _holds_in_slot(value: Any, name: str, held: Any) -> bool:
    return getattr(value, name, None) is held


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        own = vars(base).get("__slots__", ()) if is_users(base.__module__) else ()
        found += [own] if isinstance(own, str) else own
    return found


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*dict.keys(container), *dict.values(container)]
    return list(container)


def _is_still(container: Any, items: list[Any]) -> bool:
    found = _items(container)
    return len(found) == len(items) and all(map(is_, found, items))


def _identical(found: list[Any], known: list[Any]) -> bool:
    if len(found) != len(known):
        return False
    pairs = zip(found, known, strict=True)
    return all(a is b or (isinstance(b, weakref.ref) and a is b()) for a, b in pairs)


class _Empty:
    """Has nothing but its attributes."""


def _is_record(value: Any, depth: int) -> bool:
    """Whether an object holds nothing but plain values, and records of them."""
    held = getattr(value, "__dict__", None)
    if not isinstance(held, Mapping) or depth <= 0 or isinstance(value, (type, ModuleType)):
        return False
    if type(value).__basicsize__ > _Empty.__basicsize__ and not isinstance(value, SimpleNamespace):
        return False  # it holds more than its attributes
    stack: list[Any] = list(held.values())
    for item in stack:  # grows while it is walked
        if isinstance(item, (*_PLAIN, float, *_OBJECTS)):
            continue
        if type(item) in (list, tuple, dict, set, frozenset):
            stack += _items(item) if len(item) <= _LONG else []
        elif not _is_record(item, depth - 1):
            return False
    return True
