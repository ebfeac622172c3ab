"""What places hold before something runs: to be compared with afterwards, and put back.

What changes by being used (an iterator, a generator of random numbers) lends a copy meanwhile.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import operator
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextvars import Context, ContextVar
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.errors import SideEffectError
from rkgb.guards.entries import ABSENT, cell_content, remembered
from rkgb.guards.holding import (
    BOUND,
    CACHED,
    MOST_BYTES,
    bytes_of,
    can_be_written,
    home_of,
    pairs_of,
    slots_of,
    too_long,
    write,
)
from rkgb.guards.owners import is_users
from rkgb.torch_api.patches import meant
from rkgb.torch_api.private.scripted import ScriptFunction, anew
from rkgb.torch_api.quiet import without_warnings

# What keeps no key, or no value, alive.
_WEAK_DICTS = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
CONTAINERS = (list, dict, set, deque, weakref.WeakSet, *_WEAK_DICTS)
OF_MODULE = frozenset(vars(nn.Module()))  # attributes that every module has
# Of Python's own, which hold what users put there.
_BAGS = frozenset(("collections", "_thread", "_contextvars"))
_DEPTH = 4  # of containers and objects in each other
_LONG = 512  # longer containers are not looked into
_CLOSED = (str, bytes, int, float, complex, Tensor, nn.Module, torch.dtype)
_KEYED = (dict, set, frozenset, weakref.WeakKeyDictionary, weakref.WeakSet)
_MADE_ANEW = (int, str, bytes, torch.device, torch.Size)
_OF_NUMPY = ("bit_generator", "get_state")  # generators of random numbers have one of these
# Of queues, of what writes to files, and of connections.
_USED_UP = frozenset(
    (
        *("queue", "_queue", "multiprocessing.queues", "multiprocessing.connection"),
        *("_csv", "sqlite3", "socket", "_socket", "ssl"),
    )
)
_STREAMS = (io.IOBase, types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


def is_used_up(value: Any) -> bool:
    """Whether a value is one that changes by being used, and cannot be looked at without.

    Examples:
        >>> is_used_up(iter([1])), is_used_up([1])
        (True, False)
    """
    kind, home = type(value), home_of(type(value))
    if (subject := subject_of(value)) is not None:
        return is_used_up(subject)
    # By its type: the `__class__` of a library of C raises an error.
    if issubclass(kind, (random.Random, ScriptFunction, *_STREAMS)) or home in _USED_UP:
        return True
    if isinstance(value, torch.Generator):
        return value is not torch.default_generator
    if home.startswith("numpy.random") and any(hasattr(value, n) for n in _OF_NUMPY):
        return True
    return hasattr(kind, "__next__") and not isinstance(value, _CLOSED)


def subject_of(value: Any) -> Any:
    """Return the object of a method; None for others, and of random numbers that all draw."""
    if not isinstance(value, (MethodType, *BOUND)):
        return None
    known = (random.random, getattr(sys.modules.get("numpy.random"), "random", None))
    subject = value.__self__
    is_known = any(subject is getattr(method, "__self__", None) for method in known)
    return None if is_known or isinstance(subject, (ModuleType, type)) else subject


def is_same(a: Any, b: Any) -> bool:
    """Whether one object is the other, or an equal one of those that may be made anew.

    Each read of `tensor.device`, say, makes an object.

    Examples:
        >>> is_same(torch.ones(1).device, torch.ones(1).device), is_same([], [])
        (True, False)
    """
    return a is b or (type(a) is type(b) and isinstance(a, _MADE_ANEW) and bool(a == b))


def has_content(value: Any) -> bool:
    """Whether a value is a container or an array, which may hold something else later."""
    return issubclass(type(value), CONTAINERS) or can_be_written(value)


def content_of(container: Any) -> Any:
    """Return a shallow copy of a container or an array, to compare with later."""
    if not issubclass(type(container), CONTAINERS):
        return bytes_of(container, MOST_BYTES)
    if isinstance(container, dict):  # it may be of a kind that makes what it is asked for
        return dict(pairs_of(container))
    return dict(container) if isinstance(container, _WEAK_DICTS) else list(container)


def same_content(a: Any, b: Any) -> bool:
    """Whether two contents hold the same objects in the same places."""
    if not isinstance(b, (dict, list)):
        return bool(a == b)
    if isinstance(a, dict) and isinstance(b, dict):
        a, b = [*a, *a.values()], [*b, *b.values()]
    return len(a) == len(b) and all(map(operator.is_, a, b))


def put_back(container: Any, content: Any) -> None:
    """Let a container hold what it held."""
    if same_content(content_of(container), content):
        return
    if not issubclass(type(container), CONTAINERS):
        write(container, content)
    else:
        container.clear()
        if isinstance(container, (list, deque)):
            container.extend(content)
        else:
            container.update(content)


class Reached:
    """What a value leads to that may change: containers, attributes of objects and classes.

    `asked` are names of attributes: of modules and classes others are not followed. What torch
    calls a module is looked into if it is not `inside` of the model, of which these are the ids.
    """

    def __init__(self, asked: frozenset[str], inside: Collection[int] | None = None) -> None:
        self.asked, self.inside = asked, inside
        self.owners: dict[int, Any] = {}  # containers, `vars` of objects, and classes
        self.used: list[Any] = []
        self.caches: list[Any] = []  # functions that remember their results
        self.long: list[Any] = []  # longer than a guard looks at
        self.closed: list[Any] = []  # modules and tensors
        self.keys: list[Any] = []  # of dicts, and items of sets, but those that count by value

    def add(self, value: Any, depth: int = 0) -> None:
        """Add what a value leads to."""
        if type(value) in weakref.ProxyTypes:
            try:
                value = value.__repr__.__self__
            except ReferenceError:  # it is gone
                return
        elif issubclass(type(value), weakref.ref):
            value = value()
        if value is None or id(value) in self.owners:
            return
        if isinstance(value, _CLOSED):
            if isinstance(value, (Tensor, nn.Module)):
                self.closed.append(value)
            is_outside = self.inside is not None and id(value) not in self.inside
            if is_outside and isinstance(value, nn.Module) and depth < _DEPTH:
                self._follow_module(value, depth + 1)
        elif type(value) is CACHED:
            self.caches.append(value)
        elif is_used_up(value):
            self.used.append(value)
        elif too_long(value):
            self.long.append(value)
        elif (subject := subject_of(value)) is not None:
            self.add(subject, depth)
        elif depth < _DEPTH:
            self._follow(value, depth + 1)

    def _follow(self, value: Any, depth: int) -> None:
        if issubclass(type(value), _KEYED):  # not `isinstance`, which asks objects what they are
            self.keys += [key for key in value if not isinstance(key, _MADE_ANEW)]
        if can_be_written(value):
            self.owners[id(value)] = value
        elif issubclass(type(value), CONTAINERS):
            self.owners[id(value)] = value
            content = content_of(value) if len(value) <= _LONG else ()
            self._add_all(content.values() if isinstance(content, dict) else content, depth)
        elif isinstance(value, (tuple, frozenset)):
            self._add_all(value, depth)
        elif isinstance(value, functools.partial):
            self._add_all((value.func, value.args, value.keywords), depth)
        elif isinstance(value, (ModuleType, type)):
            home = value.__name__ if isinstance(value, ModuleType) else value.__module__
            if is_users(home):
                self.owners[id(value)] = value
                table = vars(value)
                self._add_all((table[n] for n in self.asked & table.keys()), depth)
        else:
            # Loggers, for one, are nobody's.
            is_bag = isinstance(value, types.SimpleNamespace) or type(value).__module__ in _BAGS
            is_followed = is_bag or is_users(home_of(value))
            held = _attributes_of(value) if is_followed else {}
            if held or (is_followed and hasattr(value, "__dict__")):
                self.owners[id(value)] = value
                self._add_all(held.values(), depth)

    def _follow_module(self, module: nn.Module, depth: int) -> None:
        self.owners[id(module)] = module
        parts = module._modules
        self._add_all((parts[name] for name in self.asked & parts.keys()), depth)
        self._add_all([v for n, v in vars(module).items() if n not in OF_MODULE], depth)

    def _add_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            self.add(value, depth)


class Contents:
    """What owners of values held when they were added.

    An owner is a container, an object or a class with attributes, a cell, or the variables of a
    module of which some names count.
    """

    def __init__(self, copy_of: Callable[[Any], Any] | None = None) -> None:
        self._held: dict[tuple[int, str | None], tuple[Any, Any]] = {}
        self.copy_of = copy_of  # of what the module holds, if a copy of the module runs
        self._originals: dict[int, tuple[Any, Any]] = {}  # by the ids of copies, which they have
        self._knowing: list[tuple[Any, str | None]] = []  # owners to which such copies are lent
        self._copies: list[tuple[Any, Any, Any]] = []  # kept: owner, place, and copy
        # Functions that remember results, by identity: each with those that they had.
        self.caches: dict[int, tuple[Any, Collection[Any]]] = {}

    def add(
        self, owner: Any, name: str | None = None, *, lends: bool = True, keeps: bool = False
    ) -> None:
        """Keep what an owner holds, or what it holds by a name, if that is new.

        If it `lends`, copies take the places of what changes by being used, and of what the module
        holds; if it `keeps` them, they do so later.
        """
        key = id(owner), name
        if key in self._held:
            return
        content = _content(owner, name)
        self._held[key] = owner, content
        is_own = self.copy_of is not None and self.copy_of(owner) is not owner
        if not (lends or keeps) or is_own:  # nobody gets to a part of the module itself
            return
        places: Iterable[tuple[Any, Any]] = ()
        if lends and name is None and issubclass(type(owner), CONTAINERS):
            new = _each(content, self._copied)
            put_back(owner, new)
            parts = (*new, *new.values()) if isinstance(new, dict) else new
            if any(id(part) in self._originals for part in parts):
                self._knowing.append((owner, name))
        elif name is not None or isinstance(owner, CellType):
            places = ((name, content),)
        elif isinstance(content, dict):
            places = content.items()
        elif isinstance(owner, list):
            places = enumerate(content)
        pairs = ((place, value, self._copied(value)) for place, value in places)
        copies = [(owner, place, copy_) for place, value, copy_ in pairs if copy_ is not value]
        if any(id(copy_) in self._originals for _, _, copy_ in copies):
            self._knowing.append((owner, name))
        self._copies += copies if keeps else []
        _lend(() if keeps else copies)

    def _copied(self, value: Any) -> Any:
        """Return what takes the place of a value: a copy, or the value itself."""
        if is_used_up(value):
            return copied(value)
        if self.copy_of is None or (found := self.copy_of(value)) is value:
            return value
        self._originals[id(found)] = value, found
        return found

    def is_lent(self, value: Any) -> bool:
        """Whether a value is a copy that was lent for a part of the module."""
        return id(value) in self._originals

    def _meant(self, value: Any) -> Any:
        """Return the original of a copy that was lent, or the value itself."""
        return self._originals.get(id(value), (value,))[0]

    def _all_meant(self, content: Any) -> Any:
        return _each(content, self._meant) if self._originals else content

    def add_caches(self, caches: Iterable[Any]) -> None:
        """Let functions forget later what they compute from now on."""
        for cached in caches:
            self.caches.setdefault(id(cached), (cached, (*remembered(cached)[0],)))

    def keep_results(self, kept: Container[Any]) -> None:
        """Let these functions remember their results."""
        self.caches = {key: one for key, one in self.caches.items() if one[0] not in kept}

    def new_results(self, cached: Any) -> list[Any]:
        """Return by what a function remembers results that it has computed meanwhile."""
        known = {*map(id, self.caches[id(cached)][1])}
        return [key for key in remembered(cached)[0] if id(key) not in known]

    def as_now(self) -> Contents:
        """Return what the same owners hold now."""
        now = Contents()
        for (_, name), (owner, _) in self._held.items():
            now.add(owner, name, lends=False)
        return now

    def lent(self) -> Sequence[tuple[Any, str | None]]:
        """Return the owners that hold parts of the module, to which copies were lent."""
        return self._knowing

    def lend(self) -> None:
        """Put everything back, and the copies that were kept, each for once."""
        self.restore()
        _lend(self._copies)
        self._copies = []

    def held(self) -> Iterator[tuple[Any, Any]]:
        """Yield owners of which all counts, and what they held."""
        for (_, name), (owner, content) in self._held.items():
            if name is None:
                yield owner, content

    def changed(self) -> Iterator[tuple[Any, str | None]]:
        """Yield the owners that hold something else, but for copies that were lent."""
        for (_, name), (owner, content) in self._held.items():
            now = _content(owner, name)
            if isinstance(content, (dict, list)) and not (name or isinstance(owner, CellType)):
                if not _alike(owner, self._all_meant(now), content):
                    yield owner, name
            elif name is None and isinstance(content, bytes):
                if now != content:
                    yield owner, name
            elif self._meant(now) is not content and not is_used_up(content):
                yield owner, name

    def used_up(self) -> Iterator[tuple[Any, str | None]]:
        """Yield the owners that hold something that changes by being used."""
        for (_, name), (owner, content) in self._held.items():
            values: Iterable[Any] = (content,)
            if name is None and isinstance(content, (dict, list)):
                values = content.values() if isinstance(content, dict) else content
            if any(map(is_used_up, values)):
                yield owner, name

    def restore(self) -> None:
        """Put everything back."""
        for cached, known in self.caches.values():
            if not known:
                cached.cache_clear()
            else:  # one of a bounded memory stays among those that it drops first, as nobody's
                for key in self.new_results(cached):
                    del remembered(cached)[0][key]
        for (_, name), (owner, content) in self._held.items():
            if name is not None or isinstance(owner, CellType):
                if _content(owner, name) is not content:
                    _set(owner, name, content)
            elif has_content(owner):
                put_back(owner, content)
            else:
                now = _content(owner, None)
                for own in (*(now.keys() - content.keys()), *content):
                    value = content.get(own, ABSENT)
                    if now.get(own, ABSENT) is not value:
                        _set(owner, own, value)


def _each(content: dict[Any, Any] | list[Any], of: Callable[[Any], Any]) -> Any:
    if isinstance(content, dict):
        return {of(key): of(value) for key, value in content.items()}
    return [*map(of, content)]


def _lend(copies: Iterable[tuple[Any, Any, Any]]) -> None:
    for owner, place, copy_ in copies:
        if isinstance(owner, list):
            owner[place] = copy_
        else:
            _set(owner, place, copy_)


def _set(owner: Any, name: str | None, value: Any) -> None:
    """Let a cell, a dict or an object hold a value, or nothing."""
    if isinstance(owner, (CellType, type)):
        place = "cell_contents" if isinstance(owner, CellType) else str(name)
        if value is ABSENT:
            delattr(owner, place)
        else:
            setattr(owner, place, value)
    elif isinstance(owner, dict):
        if value is ABSENT:
            owner.pop(name, None)
        else:
            owner[name] = value
    elif isinstance(owner, ContextVar):
        with contextlib.suppress(LookupError):  # only its token could take a value away again
            owner.set(Context().run(owner.get) if value is ABSENT else value)
    elif name in slots_of(type(owner)):  # past a `__setattr__` of the user's, as for a frozen class
        if value is ABSENT:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, value)
    else:
        _set(vars(owner), name, value)


def _content(owner: Any, name: str | None) -> Any:
    if name is not None:
        return owner.get(name, ABSENT)
    if isinstance(owner, CellType):
        return cell_content(owner)
    if has_content(owner):
        return content_of(owner)
    if isinstance(owner, (type, ModuleType)):
        # While a step is recorded, functions of ours stand in some places.
        found = {n: meant(v, ABSENT) for n, v in vars(owner).items() if not n.startswith("__")}
        return {name: value for name, value in found.items() if value is not ABSENT}
    return _attributes_of(owner)


def _attributes_of(owner: Any) -> dict[str, Any]:
    """Return the attributes that an object has for itself, those in slots included."""
    if isinstance(owner, ContextVar):
        return {"value": owner.get(ABSENT)}
    held = getattr(owner, "__dict__", None)
    found = dict(held) if isinstance(held, dict) else {}
    for name in () if isinstance(owner, FunctionType) else slots_of(type(owner)):
        if not name.startswith("__") and hasattr(owner, name):
            found[name] = getattr(owner, name)
    return found


def _alike(owner: Any, now: Any, content: Any) -> bool:
    if not isinstance(content, dict):
        return len(now) == len(content) and all(
            is_same(a, b) or is_used_up(b) for a, b in zip(now, content, strict=True)
        )
    new = now.keys() - content.keys()
    if isinstance(owner, FunctionType):  # another function in a wrapping, made once
        new = {name for name in new if not hasattr(now[name], "__wrapped__")}
    if isinstance(owner, OrderedDict) and [*now] != [*content]:
        return False
    return not new and all(
        is_same(now.get(key, ABSENT), value) or is_used_up(value) for key, value in content.items()
    )


class Untouched:
    """Stands in for an open file, a generator or a queue, which a forward may have but not use."""

    def __init__(self, place: str) -> None:
        self._place = place

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise SideEffectError(
            f"the forward uses {self._place}: recording a step would read or write it once more "
            "than the step does. Use it outside of the forward, and pass what it gives as an "
            "argument."
        )

    __getattr__ = __iter__ = __next__ = __enter__ = __exit__ = __call__ = __bool__ = _refuse

    def __deepcopy__(self, _memo: Any) -> Untouched:
        return self


def copied(value: Any) -> Any:
    """Return a copy of what changes by being used, or what stands in for it."""
    if (subject := subject_of(value)) is not None:
        return getattr(copied(subject), value.__name__)
    if isinstance(value, ScriptFunction):  # its first calls compile it, to other bits
        return anew(value)
    try:
        with without_warnings():  # Python 3.12 warns that 3.14 copies no iterators of itertools
            return copy.deepcopy(value)
    except Exception:  # files, generators
        return Untouched(f"an open file, a generator or a queue ({type(value).__name__})")
