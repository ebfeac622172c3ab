"""What values hold, by their kind: items, bytes, attributes; and whose Python reads them."""

from __future__ import annotations

import array
import ctypes
import sys
import weakref
from collections import deque
from collections.abc import Mapping
from operator import is_
from types import BuiltinFunctionType, FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import torch

from rkgb.guards.owners import is_users

PLAIN = (type(None), bool, int, complex, str, bytes, torch.dtype, torch.device, torch.Size)
OBJECTS = (
    torch.layout,
    torch.memory_format,
    staticmethod,
    classmethod,
    property,
    BuiltinFunctionType,
)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
VIEWS: tuple[type, ...] = (MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))
LONG = 512  # of longer containers only the length and the identity count: vocabularies, data
_BUFFERS: tuple[Any, ...] = (
    *(bytearray, array.array, memoryview),
    *(ctypes.Array, ctypes.Structure, ctypes.c_int.__base__),
)
# Bags of attributes, and loggers, which change whenever anybody logs.
_OPEN = frozenset(("logging", "types", "argparse"))


def home_of(value: Any) -> str:
    """Return the module whose Python reads what an object, a class or a function keeps."""
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__", ""))
    return (value if isinstance(value, type) else type(value)).__module__


def keeps_to_itself(value: Any) -> bool:
    """Whether it is Python of the standard library that reads the attributes of an object."""
    if isinstance(value, (ModuleType, type)):
        return False
    top = home_of(value).partition(".")[0]
    return top in sys.stdlib_module_names and top not in _OPEN


def bytes_of(value: Any, most: int) -> bytes | None:
    """Return the content of an array of plain numbers; None if it is none, or a longer one."""
    if type(value).__module__ == "numpy":
        return value.tobytes() if getattr(value, "nbytes", most + 1) <= most else None
    if isinstance(value, _BUFFERS):
        view: memoryview[Any] = memoryview(value)
        return view.tobytes() if view.nbytes <= most else None
    return None


def slots_of(kind: type) -> list[str]:
    """Return the names of slots that classes of the user have."""
    found: list[str] = []
    for base in kind.__mro__:
        own = vars(base).get("__slots__", ()) if is_users(base.__module__) else ()
        found += [own] if isinstance(own, str) else own
    return found


def items_of(container: Any) -> list[Any]:
    """Return what a container holds; of a dict keys and values."""
    if isinstance(container, dict):
        return [*dict.keys(container), *dict.values(container)]
    return list(container)


def is_still(container: Any, items: list[Any]) -> bool:
    """Whether a container holds the same objects still."""
    found = items_of(container)
    return len(found) == len(items) and all(map(is_, found, items))


def identical(found: list[Any], known: list[Any]) -> bool:
    """Whether these are the known objects, of which some are known by weak references."""
    if len(found) != len(known):
        return False
    pairs = zip(found, known, strict=True)
    return all(a is b or (isinstance(b, weakref.ref) and a is b()) for a, b in pairs)


class _Empty:
    """Has nothing but its attributes."""


def is_record(value: Any, depth: int) -> bool:
    """Whether an object holds nothing but plain values, and records of them."""
    held = getattr(value, "__dict__", None)
    if not isinstance(held, Mapping) or depth <= 0 or isinstance(value, (type, ModuleType)):
        return False
    if type(value).__basicsize__ > _Empty.__basicsize__ and not isinstance(value, SimpleNamespace):
        return False  # it holds more than its attributes
    stack: list[Any] = list(held.values())
    for item in stack:  # grows while it is walked
        if isinstance(item, (*PLAIN, float, *OBJECTS, FunctionType)):
            continue
        if type(item) in (list, tuple, dict, set, frozenset):
            stack += items_of(item) if len(item) <= LONG else []
        elif not is_record(item, depth - 1):
            return False
    return True
