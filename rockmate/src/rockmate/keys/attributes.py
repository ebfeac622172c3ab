"""Attributes of modules as part of a key: what they are worth, and whether they are the same still.

Numbers, flags, text and the containers of them count by value. An object that holds nothing else,
such as a configuration, counts by the values in it. Everything else counts by identity.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (type(None), bool, int, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_OBJECTS = (type, FunctionType, ModuleType, torch.layout, torch.memory_format)
Place = tuple[str, str]  # of an attribute: path of its module, and name
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


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A tensor that is no parameter and no buffer, with its content as it is now; not kept alive.

    A recording holds a copy of it, so another content is another plan.
    """

    tensor: weakref.ref[Tensor]
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> Held:
        return cls(weakref.ref(tensor), -1 if tensor.is_inference() else tensor._version)

    def holds(self) -> bool:
        """Whether the tensor is still alive and has not been written to."""
        tensor = self.tensor()
        return tensor is not None and Held.of(tensor).version == self.version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Held) or other.version != self.version:
            return False
        ours = self.tensor()
        return ours is not None and ours is other.tensor()

    def __hash__(self) -> int:
        return hash((Held, self.version))


@dataclass
class Watched:
    """Looks at containers and objects again: the same things in them still?"""

    checks: list[Callable[[], bool]] = field(default_factory=list)
    # What is watched already: a configuration is an attribute of every module of its model.
    _known: dict[tuple[int, int], Hashable] = field(default_factory=dict)

    def worth(self, value: Any, depth: int = 0) -> Hashable:
        """Return what a value counts as, and watch what it holds."""
        kind = type(value)
        if isinstance(value, float):
            return kind, value.hex()  # 0.0 is not -0.0, and nan is nan
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, Tensor):
            held = Held.of(value)
            self.checks.append(held.holds)
            return held
        if kind in (list, tuple, dict, set, frozenset, deque) and depth < _DEPTH:
            return self._container(value, depth)
        if isinstance(value, (*_OBJECTS, nn.Module)) or depth >= _DEPTH:
            return Same(value)
        if isinstance(value, MethodType):
            return Same(value.__func__), Same(value.__self__)
        if _is_record(value, _DEPTH - depth):
            return kind, self._container(vars(value), depth)
        return Same(value)

    def _container(self, value: Any, depth: int) -> Hashable:
        kind, items = type(value), _items(value)
        if kind is tuple:
            return kind, tuple(self.worth(item, depth + 1) for item in items)
        if kind is frozenset:
            return kind, frozenset(self.worth(item, depth + 1) for item in items)
        place = id(value), depth  # a check keeps it alive, so that no other gets its place
        if place not in self._known:
            self._known[place] = self._watched(value, items, depth)
        return self._known[place]

    def _watched(self, value: Any, items: list[Any], depth: int) -> Hashable:
        """Return what a container that may change counts as, and look at it again from now on."""
        kind, count = type(value), len(items)
        if count > _LONG:
            self.checks.append(lambda: len(value) == count)
            return Same(value), count
        if any(isinstance(item, Tensor) for item in items):
            known = [weakref.ref(i) if isinstance(i, Tensor) else i for i in items]
            self.checks.append(lambda: _identical(_items(value), known))
        else:
            self.checks.append(partial(_is_still, value, items))
        worth = [self.worth(item, depth + 1) for item in items]
        return kind, frozenset(worth) if kind is set else tuple(worth)


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container, *container.values()]
    return list(container)


def _is_still(container: Any, items: list[Any]) -> bool:
    found = _items(container)
    return len(found) == len(items) and all(map(is_, found, items))


def _identical(found: list[Any], known: list[Any]) -> bool:
    if len(found) != len(known):
        return False
    pairs = zip(found, known, strict=True)
    return all(a is b or (isinstance(b, weakref.ref) and a is b()) for a, b in pairs)


def _is_record(value: Any, depth: int) -> bool:
    """Whether an object holds nothing but plain values, and records of them."""
    held = getattr(value, "__dict__", None)
    if not isinstance(held, Mapping) or depth <= 0:
        return False
    stack: list[Any] = list(held.values())
    for item in stack:  # grows while it is walked
        if isinstance(item, (*_PLAIN, float, *_OBJECTS)):
            continue
        if type(item) in (list, tuple, dict, set, frozenset):
            stack += _items(item) if len(item) <= _LONG else []
        elif not _is_record(item, depth - 1):
            return False
    return True
