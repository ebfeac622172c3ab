"""What a value counts as, and whether it is the same still.

Numbers, flags, text and the containers of them count by value. An object that holds nothing else,
such as a configuration, counts by the values in it. Other objects and modules of Python count by
identity, and by what their attributes hold that the forward's Python asks for.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABCMeta
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import Context, ContextVar
from functools import partial
from itertools import chain
from logging import Filterer, Manager
from operator import attrgetter, is_, methodcaller
from threading import local
from types import FunctionType, MappingProxyType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.guards.entries import (
    ABSENT,
    Attribute,
    Entries,
    Items,
    attributes_of,
    dict_behind,
    remembered,
)
from rkgb.guards.holding import (
    BOUND,
    CACHED,
    CONTAINERS,
    DECIDES,
    LONG,
    MOST_BYTES,
    MOST_ITEMS,
    OBJECTS,
    PLAIN,
    SPECIAL,
    UNREAD,
    VIEWS,
    Registered,
    bytes_of,
    decimal_context,
    fields_of,
    holds_objects,
    home_of,
    identical,
    is_record,
    is_still,
    items_of,
    keeps_to_itself,
    layout_of,
    names_asked_by,
)
from rkgb.guards.loads import ANY
from rkgb.guards.owners import is_users
from rkgb.guards.worth import Content, Kept, Named, Same
from rkgb.torch_api import Settings, has_in_head, settings_of, unusual_facts

# Dynamo wraps these of `nn.Module` when it compiles for the first time: they only count modules.
_TAGGED_BY_DYNAMO = frozenset(("__init__", "__setstate__"))
_DEPTH, _DEEP = 4, 100  # of containers and objects in each other: of what nobody reads, and others


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
        self.found: set[str] = set()  # names that are asked for, which are not among these
        self.checks: list[Callable[[], bool]] = []
        self.attributes: dict[str, Attribute] = {}  # of functions and the like, by name
        self._slots: dict[str, Attribute] = {}
        self._items = Items()
        self.where = ""  # what is looked at now, in words
        self.is_read = True  # by Python of the user: it is followed as far as it leads
        self._modules, self._named = modules, named  # that are known by their path, by identity
        self.outside: list[tuple[str, nn.Module]] = []  # modules that are not: where, and which
        # Not kept alive: what a step keeps for the next one may be replaced there.
        self.tensors: list[weakref.ref[Tensor]] = []
        self._kinds: list[Hashable] = []
        self._written: dict[int, tuple[Hashable, ...]] = {}  # what is written on them
        self._numbers: dict[int, int] = {}  # of tensors, by identity
        self._entries: dict[int, Entries] = {}  # by the identity of the dict
        self.objects: list[Any] = []  # whose classes and attributes may be exchanged
        self._classes: list[type] = []
        self._abstract, self._counts_decimals = Registered(), False
        # What is watched already: a configuration is an attribute of every module of its model.
        # Each is kept alive, so that no other gets its place.
        self._known: dict[tuple[int, bool], tuple[Any, Hashable]] = {}

    @property
    def tables(self) -> list[dict[Any, Any]]:
        """The dicts that are looked at again only after somebody has written to them."""
        return [entries.table for entries in self._entries.values()]

    @property
    def empty(self) -> Sequence[Any]:
        """The lists and sets in which nothing is looked at but whether they are still empty."""
        return self._items.empty

    def fields(self) -> list[tuple[Any, str]]:
        """Return the attributes of functions and the like that are looked at, each by its name."""
        return [pair for one in self.attributes.values() for pair in one.pairs()]

    def holds(
        self, written: Iterable[Mapping[Any, Any]] | None = None, *, untouched: bool = False
    ) -> bool:
        """Whether everything is as it was, where of the tables at most these were written to.

        If it is `untouched`, the classes of `objects`, the `fields` and what is `empty` are known
        to be.
        """
        for table in self.tables if written is None else written:
            entries = self._entries.get(id(table))
            if entries is not None and not entries.hold():
                return False
        if self.tensors and [self._kind(ref()) for ref in self.tensors] != self._kinds:
            return False
        return (
            (untouched or self._hold_one_by_one())
            and self._items.hold()
            and all(one.holds() for one in self._slots.values())
            and all(check() for check in self.checks)
        )

    def _hold_one_by_one(self) -> bool:
        return (
            not any(self.empty)
            and all(map(is_, map(type, self.objects), self._classes))
            and all(one.holds() for one in self.attributes.values())
        )

    def entries(self, table: dict[Any, Any]) -> Entries:
        """Return what counts of a dict."""
        entries = self._entries.get(id(table))
        if entries is None:
            entries = self._entries[id(table)] = Entries(table)
        return entries

    def note_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Look from now on whether an attribute of a function, or the like, is the same object."""
        if name not in self.attributes:
            self.attributes[name] = Attribute(name)
        self.attributes[name].note(owner, value)

    def worth(self, value: Any, depth: int = 0) -> Hashable:
        """Return what a value counts as, and watch what it holds."""
        kind = type(value)  # not `isinstance`, which asks objects what they are
        if kind is float or (issubclass(kind, float) and attributes_of(value) is None):
            return kind, value.hex()  # 0.0 is not -0.0, and nan is nan
        if kind in PLAIN:
            return kind, value
        if issubclass(kind, Tensor):
            return self._tensor(value)
        if issubclass(kind, nn.Module):
            if id(value) not in self._modules:
                self.outside.append((self.where, value))
            return Same(value)
        if depth >= (_DEEP if self.is_read else _DEPTH):
            return Same(value)
        if kind in BOUND and not isinstance(value.__self__, (NoneType, ModuleType)):
            return Same(value), self.worth(value.__self__, depth + 1)
        if issubclass(kind, OBJECTS):
            return Same(value)
        if kind is MethodType:
            return Same(value.__func__), self.worth(value.__self__, depth)
        place = id(value), self.is_read
        if place not in self._known:
            self._known[place] = value, Same(value)  # where it leads back to itself
            found = self._followed(value, depth)
            self._known[place] = value, Content(found) if isinstance(found, tuple) else found
        return self._known[place][1]

    def _tensor(self, value: Tensor) -> Hashable:
        path = self._named.get(id(value))
        if path is not None:
            return Named(path)
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(weakref.ref(value))
            self._kinds.append(self._kind(value))
            self._written[number] = tuple(self.of_tensor(value)) if self.asked else ()
        kept = Kept(number, self._kinds[number])
        return (kept, *written) if (written := self._written.get(number)) else kept

    def _kind(self, tensor: Tensor | None) -> Hashable:
        """Return what a plan takes for granted of a tensor; None if it is gone."""
        if tensor is None:
            return None
        found = unusual_facts(tensor, self.asked)
        return (*_kind(tensor), found) if found else _kind(tensor)

    def _weak(self, value: weakref.ref[Any], depth: int) -> Hashable:
        """Return what an object counts as that nobody may keep alive: by what it holds."""
        held = value()
        if isinstance(held, MethodType):  # of a weak reference to a method
            held = held.__self__
        is_known = held is None or id(held) in self._modules
        table = None if is_known else attributes_of(held)
        known: list[Any] = [Same(value), type(held)]
        is_there = held is not None
        if table is not None:
            self.entries(table).note_absent(self.asked)
            known += self._of_classes(held, depth)
        del held
        self.checks.append(lambda: (value() is not None) is is_there)
        if table is not None:
            known += self._entries_of(table, table.keys(), depth)
        return tuple(known)

    def _cached(self, value: Any, depth: int) -> Hashable:
        """Return what a function counts as that remembers its results: what it has until now."""
        found, (table, results) = self._object(value, depth), remembered(value)
        if not table:  # a recording computes what it will remember, and a later call reads that
            self.entries(table).add_check(lambda: not table)
        for key, held in table.items():
            self.entries(table).note(key, held)
        pairs = zip(table, results, strict=True)
        return found, *((Same(key), self.worth(result, depth + 1)) for key, result in pairs)

    def _settings(self, module: Settings, depth: int) -> Hashable:
        """Return what a module of torch's settings counts as: by those that are asked for."""
        names = [n for n in settings_of(module) if self.asked.issuperset(n.split("."))]
        held = [getattr(module, name, ABSENT) for name in names]
        if names:
            self.checks.append(lambda: identical([getattr(module, n, ABSENT) for n in names], held))
        return Same(module), *names, *(self.worth(one, depth + 1) for one in held)

    def _followed(self, value: Any, depth: int) -> Hashable:
        kind = type(value)
        if issubclass(kind, partial):
            parts = (value.func, value.args, value.keywords)
            for name, part in zip(("func", "args", "keywords"), parts, strict=True):
                self.note_attribute(value, name, part)
            return kind, tuple(self.worth(part, depth + 1) for part in parts)
        if issubclass(kind, weakref.ref):
            return self._weak(value, depth)
        if kind is CACHED:
            return self._cached(value, depth)
        if issubclass(kind, Settings):
            return self._settings(value, depth)
        if issubclass(kind, (attrgetter, methodcaller)):
            self.found |= names_asked_by(value)
            return Same(value)
        if issubclass(kind, CONTAINERS):
            content = self._container(value, depth)
            plain = kind in CONTAINERS or not attributes_of(value)
            return content if plain else (content, *self._attributes(value, depth))
        if is_record(value, _DEPTH - depth):
            self._note_class(value)
            found = self._of_classes(value, depth) if self.asked else []
            return (Same(kind), self._container(vars(value), depth), *found)
        if issubclass(kind, VIEWS):
            return Same(value), self._container(dict_behind(value), depth)
        if kind is ContextVar:
            held = value.get(ABSENT)
            self.checks.append(lambda: value.get(ABSENT) is held)
            return Same(value), self.worth(held, depth + 1)
        if kind is Context:
            held = [*value.items()]
            known = [*chain.from_iterable(held)]
            self.checks.append(lambda: identical([*chain.from_iterable(value.items())], known))
            return Same(value), *((Same(n), self.worth(v, depth + 1)) for n, v in held)
        content = bytes_of(value, MOST_BYTES if self.is_read else LONG)
        if content is None and holds_objects(value):
            return self._container(value, depth)
        if content is not None:
            self.checks.append(lambda: bytes_of(value, MOST_BYTES) == content)
            return Same(value), content, *layout_of(value)
        return self._object(value, depth)

    def _container(self, value: Any, depth: int) -> Hashable:
        kind, items = type(value), items_of(value)
        if isinstance(value, tuple):
            return kind, tuple(self.worth(item, depth + 1) for item in items)
        if isinstance(value, frozenset):
            return kind, frozenset(self.worth(item, depth + 1) for item in items)
        if self.is_read and len(items) > MOST_ITEMS and isinstance(value, dict):
            self._look_at_items(value, items)
            return Same(value), *map(Same, items)
        if len(items) > (MOST_ITEMS if self.is_read else LONG):
            count = len(items)
            self._look(value, lambda: len(items_of(value)) == count)
            return Same(value), count
        has_tensors = any(isinstance(item, Tensor) for item in items)
        if not has_tensors:
            self._look_at_items(value, items)
        elif isinstance(value, set):  # which comes first is nobody's to say
            self._look_at_items(value, items)
            return Same(value), *map(Same, items)
        else:
            known = [weakref.ref(i) if isinstance(i, Tensor) else i for i in items]
            self._look(value, lambda: identical(items_of(value), known))
        worth = [self.worth(item, depth + 1) for item in items]
        return kind, frozenset(worth) if isinstance(value, set) else tuple(worth)

    def _look_at_items(self, value: Any, items: list[Any]) -> None:
        """Look from now on whether a container holds the same objects."""
        if type(value) in (list, set):
            self._items.note(value)
        else:
            self._look(value, partial(is_still, value, items))

    def _look(self, value: Any, check: Callable[[], bool]) -> None:
        """Look from now on at a container: at a dict after a write, at others always.

        An ordered dict is no less another one when only its order is.
        """
        if isinstance(value, dict) and not isinstance(value, OrderedDict):
            self.entries(value).add_check(check)
        else:
            self.checks.append(check)

    def _object(self, value: Any, depth: int) -> Hashable:
        """Return what an object counts as: itself, and its attributes that are asked for."""
        found = [*self._attributes(value, depth), *self._of_classes(value, depth)]
        if isinstance(value, ABCMeta):
            found.append(self._registered(value))
        elif home_of(value) == "decimal":
            found.append(self._arithmetic())
        elif isinstance(value, local):  # other attributes in each thread
            table = attributes_of(value)
            self.checks.append(lambda: attributes_of(value) is table)
        self._note_class(value)
        return (Same(value), *found) if found else Same(value)

    def _registered(self, kind: ABCMeta) -> Hashable:
        """Return which classes an abstract one counts as its kinds."""
        if not self._abstract:
            self.checks.append(self._abstract.hold)
        return self._abstract.add(kind)

    def _arithmetic(self) -> Hashable:
        """Return how this thread computes with decimals: no call is seen that asks for it."""
        known = decimal_context()
        if not self._counts_decimals:
            self._counts_decimals = True
            self.checks.append(lambda: decimal_context() == known)
        return known

    def _note_class(self, value: Any) -> None:
        kind = type(value)
        if is_users(kind.__module__) and not isinstance(value, type):
            self.objects.append(value)
            self._classes.append(kind)
            table = attributes_of(value)
            if table is not None:
                self._note_slot(value, "__dict__", table)

    def _note_slot(self, value: Any, name: str, held: Any) -> None:
        """Look from now on whether what has a slot of its own holds the same object."""
        self._slots.setdefault(name, Attribute(name)).note(value, held)

    def _attributes(self, value: Any, depth: int) -> list[Hashable]:
        is_class = isinstance(value, type)
        if is_class and not is_users(value.__module__):
            return []
        table, found = attributes_of(value), list[Hashable]()
        if table is not None and (table or not isinstance(value, FunctionType)):
            asked = self.asked | SPECIAL if is_class else self.asked
            names: set[Any] = {*asked & table.keys()}
            # A manager leads to every logger of the process.
            is_open = ANY in asked and not isinstance(value, (nn.Module, ModuleType, Manager))
            if is_open:
                names = known = {*table} - UNREAD
                self.entries(table).add_check(lambda: table.keys() - UNREAD == known)
            if self.is_read and keeps_to_itself(value):
                names = {*table}  # its own Python reads them
            if isinstance(value, (Filterer, Manager)):  # loggers and handlers
                names |= DECIDES & table.keys()
            found += self._entries_of(table, names, depth)
            self.entries(table).note_absent(asked)
        for name in sorted(fields_of(value, self.asked) - (table or {}).keys()):
            held = field(value, name)
            if held is ABSENT:
                self.checks.append(lambda n=name: field(value, n) is ABSENT)  # type: ignore[misc]
            elif has_in_head(value, name):
                self.note_attribute(value, name, held)
            elif held is field(value, name):
                self._note_slot(value, name, held)
            elif isinstance(held, (*PLAIN, float, tuple)):  # made anew at every look
                self.checks.append(lambda n=name, h=held: field(value, n) == h)  # type: ignore[misc]
            # What annotations say leads far, and changes nothing else.
            deep = _DEEP - 1 if name == "__annotations__" else depth + 1
            found.append((name, self.worth(held, deep)))
        if is_class:  # for `isinstance`, and for what it inherits
            self.note_attribute(value, "__mro__", value.__mro__)
        elif keeps_to_itself(value):
            found += self._of_registries(value)
        return found

    def _of_registries(self, value: Any) -> Iterator[tuple[str, Hashable]]:
        """Yield what a class of the standard library keeps of an object elsewhere than in it."""
        kind: Any = type(value)
        for name, table in vars(kind).items():
            if type(table) is dict and kind.__hash__ is object.__hash__ and value in table:
                self.entries(table).note(value, table[value])
                yield name, Same(table[value])

    def of_tensor(self, tensor: Tensor) -> list[tuple[str, Hashable]]:
        """Return what a user has written on a tensor of a module, and is asked for."""
        table = vars(tensor)
        self.entries(table).note_absent(self.asked)
        return self._entries_of(table, self.asked & table.keys(), 0)

    def _entries_of(
        self, table: dict[Any, Any], names: Iterable[Any], depth: int
    ) -> list[tuple[str, Hashable]]:
        """Return what entries of a dict count as, by name, and look at them again."""
        entries, found = self.entries(table), list[tuple[str, Hashable]]()
        for name in sorted(names, key=str):
            value = entries.get(name)
            entries.note(name, value)
            found.append((name, self.worth(value, depth + 1)))
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
            self._known[place] = kind, Content((Same(kind), *self._attributes(kind, depth)))
        return self._known[place][1]

    def of_library(self, kind: type) -> Hashable:
        """Return what a library's class counts as: by what it has under the names asked for."""
        table, asked = attributes_of(kind), self.asked | SPECIAL
        if table is None:
            return Same(kind)
        if kind is nn.Module:
            asked -= _TAGGED_BY_DYNAMO
        entries, names = self.entries(table), sorted(asked & table.keys())
        found = [(name, entries.get(name)) for name in names]
        for name, value in found:
            entries.note(name, value)
        entries.note_absent(asked)
        return Same(kind), *((n, Same(value)) for n, value in found if value is not ABSENT)


def content_of(value: Any, asked: frozenset[str]) -> tuple[Hashable, bool]:
    """Return what an object holds now, whichever object it is, and whether that says all of it.

    Of one that holds more than values, attributes count that are `asked` for.
    """
    content = bytes_of(value, sys.maxsize)
    if content is not None:
        return (content, *layout_of(value)), True
    worth = Watched(asked).worth(value)
    if isinstance(worth, tuple) and worth[:1] == (Same(value),):
        return worth[1:], False
    return (None, False) if worth == Same(value) else (worth, True)


def _kind(tensor: Tensor) -> tuple[Hashable, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    wants = tensor.requires_grad, tensor.is_inference()
    is_lazy = tensor.is_conj(), tensor.is_neg()
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, strides, wants, is_lazy


def field(value: Any, name: str) -> Any:
    """Return an attribute of an object, or `ABSENT`."""
    try:
        return getattr(value, name)
    except Exception:  # what is written in C may raise anything
        return ABSENT
