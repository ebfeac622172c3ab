"""What a container, an object or a class holds: to be compared later, and put back."""

from __future__ import annotations

import operator
import weakref
from collections import deque
from contextvars import ContextVar
from logging import Logger
from types import FunctionType
from typing import Any

import torch
from torch import nn

from rkgb.guards.entries import ABSENT
from rkgb.guards.holding import MOST_BYTES, bytes_of, can_be_written, pairs_of, slots_of, write

# What keeps no key, or no value, alive.
_WEAK_DICTS = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
CONTAINERS = (list, dict, set, deque, weakref.WeakSet, *_WEAK_DICTS)
OF_MODULE = frozenset(vars(nn.Module()))  # attributes that every module has
MADE_ANEW = (int, str, bytes, torch.device, torch.Size)


def is_same(a: Any, b: Any) -> bool:
    """Whether one object is the other, or an equal one of those that may be made anew.

    Each read of `tensor.device`, say, makes an object.

    Examples:
        >>> is_same(torch.ones(1).device, torch.ones(1).device), is_same([], [])
        (True, False)
    """
    return a is b or (type(a) is type(b) and isinstance(a, MADE_ANEW) and bool(a == b))


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


def parts_of(content: Any) -> list[Any]:
    """Return the objects in a content: of a dict keys and values, of an array's bytes none."""
    if isinstance(content, dict):
        return [*content, *content.values()]
    return content if isinstance(content, list) else []


def same_content(a: Any, b: Any) -> bool:
    """Whether two contents hold the same objects in the same places."""
    if not isinstance(b, (dict, list)):
        return bool(a == b)
    return len(a) == len(b) and all(map(operator.is_, parts_of(a), parts_of(b)))


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


def attributes_held(owner: Any) -> dict[str, Any]:
    """Return the attributes that an object has for itself, those in slots included."""
    if isinstance(owner, ContextVar):
        return {"value": owner.get(ABSENT)}
    held = getattr(owner, "__dict__", None)
    found = dict(held) if isinstance(held, dict) else {}
    for name in () if isinstance(owner, FunctionType) else slots_of(type(owner)):
        if not name.startswith("__") and hasattr(owner, name):
            found[name] = getattr(owner, name)
    if isinstance(owner, Logger):
        found.pop("_cache", None)  # filled by use
    return found
