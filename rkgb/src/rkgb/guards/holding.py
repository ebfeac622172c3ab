"""What values hold, by their kind: items, bytes, attributes; and whose Python reads them."""

from __future__ import annotations

import abc
import array
import ctypes
import decimal
import functools
import mmap
import operator
import sys
import weakref
from abc import ABCMeta, get_cache_token
from collections import OrderedDict, deque
from collections.abc import Hashable, ItemsView, Mapping
from inspect import getattr_static
from operator import is_
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
    UnionType,
)
from typing import Any

import torch

from rkgb.guards.loads import OWN
from rkgb.guards.owners import is_pythons, is_users

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
CACHED: type = type(functools.cache(int))  # of functions that remember their results
LONG = 512  # of longer containers only the length and the identity count: vocabularies, data
MOST_ITEMS, MOST_BYTES = 100_000, 4 << 20  # what is longer is not looked at in vain: see `too_long`
# Methods that Python calls by signs of its own, so that no code names them.
_WITH_SIGNS: tuple[type, ...] = (int, float, str, list, dict, set, type, property, type(iter([])))
SPECIAL = frozenset(
    name for kind in _WITH_SIGNS for name in dir(kind) if name.startswith("__")
) | frozenset(
    f"__{name}__"
    for name in (
        *("get", "set", "delete", "getattr", "getattribute", "call", "enter", "exit", "bool"),
        *("len", "instancecheck", "subclasscheck", "class_getitem", "matmul", "imatmul"),
        *("rmatmul", "missing", "torch_function", "array", "array_ufunc", "fspath", "complex"),
        *("iadd", "isub", "imul", "itruediv", "ipow", "index", "next", "iter", "contains"),
    )
)
# What a class or an object has for Python's own use, or gets when it is looked at.
UNREAD = frozenset(
    f"__{name}__"
    for name in (
        *("annotations", "annotate_func", "annotations_cache", "dict", "doc", "init_subclass"),
        *("module", "name", "qualname", "slotnames", "static_attributes", "firstlineno"),
        *("subclasshook", "weakref", "new", "dir", "mro", "subclasses", "reduce", "reduce_ex"),
        *("abstractmethods", "prepare", "type_params", "getstate"),
    )
) | {"_abc_impl"}
SPECIAL -= UNREAD
_BUFFERS: tuple[Any, ...] = (
    *(bytearray, array.array, memoryview, mmap.mmap),
    *(ctypes.Array, ctypes.Structure, ctypes.c_int.__base__),
)
_SLOT = MemberDescriptorType
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__", "__closure__")
# What others look at, or what is the same whatever is set.
_NO_FIELDS = frozenset(
    f"__{name}__" for name in ("dict", "class", "weakref", "globals", "builtins", "text_signature")
)
_OF_DICTS = (dict.get, dict.__len__, dict.fromkeys)
_FIXED = (CodeType, GenericAlias, UnionType, *map(type, _OF_DICTS))
_IS_MADE_BY_PYTHON = 1 << 9  # a flag of classes: attributes of others cannot be set
# Of loggers, which change whenever anybody logs, their manager and handlers: whether one would log.
DECIDES = frozenset(
    (*("level", "parent", "disabled", "manager", "_disable"), *("handlers", "propagate", "filters"))
)
BOUND = (BuiltinFunctionType, MethodWrapperType)  # methods written in C, which hold their object
_OPEN = frozenset(("logging", "types", "argparse"))
# Of torch, whose objects are read by their methods; what optimizers hold changes at every step.
_CLOSED = ("torch.amp.", "torch.optim.lr_scheduler", "torch.optim.swa_utils", "torch.utils.data.")


class Registered:
    """Which classes are registered with abstract ones, and so with `isinstance`."""

    def __init__(self) -> None:
        self._known: dict[ABCMeta, Hashable] = {}
        self._token = get_cache_token()

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, kind: ABCMeta) -> Hashable:
        """Return the classes that are registered with a class or those that derive from it."""
        self._known[kind] = _registered_with(kind)
        return self._known[kind]

    def hold(self) -> bool:
        """Whether they are the same still."""
        token = get_cache_token()  # another once any class is registered with any other
        if token != self._token:
            if any(_registered_with(kind) != known for kind, known in self._known.items()):
                return False
            self._token = token
        return True


_dump: Any = vars(abc)["_get_dump"]  # of an abstract class, and first what is registered


def _registered_with(kind: ABCMeta) -> Hashable:
    found, stack = set[Any](), list[Any]([kind])
    for base in stack:  # grows while it is walked
        try:
            found |= _dump(base)[0]
        except TypeError:  # it has been made without the rest of an abstract class
            continue
        stack += type.__subclasses__(base)
    return frozenset(found)


def decimal_context() -> Hashable:
    """Return how this thread computes with decimals."""
    now = decimal.getcontext()
    return now.prec, now.rounding, now.Emin, now.Emax, now.clamp, *now.traps.values()


def home_of(value: Any) -> str:
    """Return the module whose Python reads what an object, a class or a function keeps."""
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__", ""))
    module: object = (value if isinstance(value, type) else type(value)).__module__
    return module if isinstance(module, str) else ""  # of a class that calls something else so


def keeps_to_itself(value: Any) -> bool:
    """Whether it is Python of a library that reads the attributes of an object."""
    if isinstance(value, (ModuleType, type)):
        return False
    home = home_of(value)
    if home.startswith(_CLOSED):
        return not isinstance(value, FunctionType)
    return is_pythons(home) and home.partition(".")[0] not in _OPEN


def bytes_of(value: Any, most: int) -> bytes | None:
    """Return the content of an array of plain numbers; None if it is none, or a longer one."""
    if type(value).__module__ == "numpy":
        is_short = getattr(value, "nbytes", most + 1) <= most and not holds_objects(value)
        return value.tobytes() if is_short else None
    if isinstance(value, _BUFFERS):
        view: memoryview[Any] = memoryview(value)
        return view.tobytes() if view.nbytes <= most else None
    return None


def can_be_written(value: Any) -> bool:
    """Whether a value is an array of plain numbers that may be written, and is not too long."""
    if type(value).__module__ == "numpy":
        is_open = hasattr(value, "flat") and value.flags.writeable and value.nbytes <= MOST_BYTES
        return is_open and not value.dtype.hasobject
    return isinstance(value, _BUFFERS) and not memoryview(value).readonly and not too_long(value)


def write(value: Any, content: bytes) -> None:
    """Let an array hold what `bytes_of` has returned."""
    if type(value).__module__ == "numpy":
        numpy: Any = sys.modules["numpy"]
        value[...] = numpy.frombuffer(content, value.dtype).reshape(value.shape)
    elif isinstance(value, array.array):
        del value[:]
        value.frombytes(content)
    elif isinstance(value, bytearray):
        value[:] = content
    else:
        memoryview(value).cast("B")[:] = content


def layout_of(value: Any) -> tuple[str, ...]:
    """Return how the bytes of an array of numpy's are read."""
    is_numpys = type(value).__module__ == "numpy"
    return (str(value.dtype), str(value.shape)) if is_numpys else ()


def too_long(value: Any) -> bool:
    """Whether a container or an array is so long that no call can look at all of it."""
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return len(value) > MOST_ITEMS
    if type(value).__module__ == "numpy":
        return getattr(value, "nbytes", 0) > MOST_BYTES
    return isinstance(value, _BUFFERS) and memoryview(value).nbytes > MOST_BYTES


def names_asked_by(getter: Any) -> set[str]:
    """Return the attributes that an `attrgetter` or a `methodcaller` asks for."""
    _, args, *_ = getter.__reduce__()
    own = args[:1] if isinstance(getter, operator.methodcaller) else args
    return {part for name in own if isinstance(name, str) for part in name.split(".")}


def holds_objects(value: Any) -> bool:
    """Whether a value is an array of numpy's that holds objects of Python."""
    is_array = type(value).__module__ == "numpy" and hasattr(value, "flat")
    return is_array and bool(value.dtype.hasobject)


def slots_of(kind: type) -> list[str]:
    """Return the names of slots that classes of the user have, but those behind a property."""
    found = list(_OF_FUNCTIONS) if kind is FunctionType else []
    for base in kind.__mro__:
        own = vars(base).get("__slots__", ()) if is_users(base.__module__) else ()
        names = [own] if isinstance(own, str) else own
        found += [n for n in names if isinstance(getattr_static(kind, n, None), _SLOT)]
    return found


@functools.lru_cache(maxsize=20_000)
def _fields_of(kind: type) -> frozenset[str]:
    if kind in _FIXED or home_of(kind).partition(".")[0] in ("numpy", "torch"):
        return frozenset()
    every = {
        name: descriptor
        for base in reversed(kind.__mro__)
        for name, descriptor in vars(base).items()
        if type(descriptor) is GetSetDescriptorType or not base.__flags__ & _IS_MADE_BY_PYTHON
    }
    own = (n for n, held in every.items() if type(held) in (_SLOT, GetSetDescriptorType))
    return frozenset(own) - _NO_FIELDS


def fields_of(value: Any, asked: frozenset[str]) -> frozenset[str]:
    """Return the names of what an object has beside its dict, as what is written in C has.

    Libraries ask much more (`inspect`, `functools`) than counts: names have a sign, `OWN`, before
    them in what is `asked` if the user's own code does.

    Examples:
        >>> fields_of(lambda: 0, frozenset((OWN + "__doc__",)))
        frozenset({'__doc__'})
        >>> fields_of(int, frozenset((OWN + "__name__",)))
        frozenset()
    """
    kind: Any = type(value)
    slots = asked.intersection(slots_of(kind))
    if isinstance(value, type) and not value.__flags__ & _IS_MADE_BY_PYTHON:
        return slots
    return slots.union(name for name in _fields_of(kind) if OWN + name in asked)


def items_of(container: Any) -> list[Any]:
    """Return what a container holds; of a dict keys and values."""
    if type(container).__module__ == "numpy":
        return [*container.flat]
    if isinstance(container, dict):
        pairs = pairs_of(container)
        return [*(key for key, _ in pairs), *(value for _, value in pairs)]
    return list(container)


def pairs_of(table: dict[Any, Any]) -> ItemsView[Any, Any]:
    """Return what a dict holds, past what its class makes of it; an ordered one in its order."""
    return OrderedDict.items(table) if isinstance(table, OrderedDict) else dict.items(table)


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
