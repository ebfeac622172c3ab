"""What places hold before something runs: to be compared with afterwards, and put back.

What changes by being used (an iterator, a generator of random numbers) lends a copy meanwhile, and
so does what a module holds of which a copy runs.
"""

from __future__ import annotations

import contextlib
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextvars import Context, ContextVar
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from rkgb.guards.entries import ABSENT, cell_content, remembered
from rkgb.guards.holding import slots_of
from rkgb.outside.held import attributes_held, content_of, has_content, is_same, parts_of, put_back
from rkgb.outside.used_up import copied, is_used_up
from rkgb.torch_api.patches import meant


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
        # Kept: an owner, which name counts, and what it holds where it has copies.
        self._copies: list[tuple[Any, str | None, Any]] = []
        # Functions that remember results, by identity: each with those that they had.
        self.caches: dict[int, tuple[Any, Collection[Any]]] = {}
        self.tensors: list[tuple[str, Tensor]] = []  # to which the places lead, which are named

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
        is_one = _holds_one(owner, name)
        lent = self._copied(content) if is_one else _each(content, self._copied)
        parts, own = ([lent], [content]) if is_one else (parts_of(lent), parts_of(content))
        if all(map(operator.is_, parts, own)):
            return
        if any(map(self.is_lent, parts)):
            self._knowing.append((owner, name))
        if keeps:
            self._copies.append((owner, name, lent))
        else:
            _put(owner, name, lent)

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

    def knows(self, owner: Any) -> bool:
        """Whether what an owner held was kept."""
        return (id(owner), None) in self._held

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
        for owner, name, lent in self._copies:
            _put(owner, name, lent)
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
            if isinstance(content, (dict, list)) and not _holds_one(owner, name):
                if not _alike(owner, self._all_meant(now), content):
                    yield owner, name
            elif name is None and isinstance(content, bytes):
                if now != content:
                    yield owner, name
            elif self._meant(now) is not content and not is_used_up(content):
                yield owner, name

    def given_for_good(self) -> Iterator[ContextVar[Any]]:
        """Yield the variables that had neither value nor default: only tokens take values away."""
        for owner, content in self.held():
            if not isinstance(owner, ContextVar) or content["value"] is not ABSENT:
                continue
            if owner.get(ABSENT) is not ABSENT:
                try:
                    Context().run(owner.get)
                except LookupError:
                    yield owner

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
            _put(owner, name, content)


def _holds_one(owner: Any, name: str | None) -> bool:
    """Whether what counts of an owner is one value, and not all that it holds."""
    return name is not None or isinstance(owner, CellType)


def _each(content: Any, of: Callable[[Any], Any]) -> Any:
    """Return a content with others in the places of what it holds; an array's bytes as they are."""
    if isinstance(content, dict):
        return {k if type(k) is str else of(k): of(value) for k, value in content.items()}
    return [*map(of, content)] if isinstance(content, list) else content


def _put(owner: Any, name: str | None, content: Any) -> None:
    """Let an owner hold this, where it holds something else."""
    if _holds_one(owner, name):
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
        table = vars(owner) if isinstance(owner, type) else owner
        return meant(table.get(name, ABSENT), ABSENT)
    if isinstance(owner, CellType):
        return cell_content(owner)
    if has_content(owner):
        return content_of(owner)
    if isinstance(owner, (type, ModuleType)):
        # While a step is recorded, functions of ours stand in some places.
        found = {n: meant(v, ABSENT) for n, v in vars(owner).items() if not n.startswith("__")}
        return {name: value for name, value in found.items() if value is not ABSENT}
    return attributes_held(owner)


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
