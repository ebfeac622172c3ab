"""Flatten arguments and results into tensors, and build them again from other tensors.

Tuples, lists, dicts and types that torch's pytree knows are flattened by pytree. Other objects that
hold tensors (a cache, a batch, a dataclass) are flattened by contents and attributes. The copy gets
the same type and attributes without a call of `__init__`.
"""

from __future__ import annotations

import copy
import operator
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.torch_api.private.tables import pytree

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
# Never flattened: nothing in them belongs to one step.
_CLOSED = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module)
_DEPTH = 12  # limit of nested objects


class UnknownTreeError(Exception):
    """An object that holds tensors cannot be flattened; `found` is the name of its type."""

    def __init__(self, found: str, why: str) -> None:
        super().__init__(f"an object of type {found} {why}")
        self.found, self.why = found, why

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.found, self.why), vars(self)


@dataclass(frozen=True, slots=True)
class _Object:
    """An object that holds tensors: its type, the names of its attributes, their structure."""

    kind: type
    names: tuple[str, ...]
    content: Structure  # of (its items if it is a container, else None; its attributes)

    def make(self, leaves: Iterator[Any]) -> Any:
        items, *values = self.content._take(leaves)
        kind: Any = self.kind
        if kind is torch.Size:
            return kind(items)
        made = tuple.__new__(kind, items) if issubclass(kind, tuple) else kind.__new__(kind)
        if isinstance(made, OrderedDict):  # which has its order in a list of its own
            for name, value in items.items():
                OrderedDict.__setitem__(made, name, value)
        elif isinstance(made, dict):
            dict.update(made, items)
        elif isinstance(made, list):
            list.extend(made, items)
        for name, value in zip(self.names, values, strict=True):
            object.__setattr__(made, name, value)
        return made


@dataclass(frozen=True, slots=True)
class _Constant:
    """An object without tensors that a step makes: each use gets a copy."""

    value: Any

    def make(self, _leaves: Iterator[Any]) -> Any:
        return copy.deepcopy(self.value)


@dataclass(frozen=True, slots=True)
class Structure:
    """A tree without its leaves. Equal structures have equal types at every node."""

    spec: pytree.TreeSpec
    inner: tuple[_Object | _Constant | None, ...]  # one per leaf of `spec`; None: a leaf

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Return the tree with these leaves."""
        return self._take(iter(leaves))

    def _take(self, leaves: Iterator[Any]) -> Any:
        taken = [next(leaves) if part is None else part.make(leaves) for part in self.inner]
        return pytree.tree_unflatten(taken, self.spec)

    def __str__(self) -> str:
        """Return the tree for display: a star for each leaf, the type of each object."""
        parts = ["*" if part is None else _Named(part) for part in self.inner]
        try:
            return str(pytree.tree_unflatten(parts, self.spec))
        except Exception:  # a type may look at what it is given, as torch's PackedSequence does
            return f"{self.spec} of {parts}"


def flatten(tree: Any, own: Mapping[int, Any] | None = None) -> tuple[list[Any], Structure]:
    """Return (leaves, structure): leaves are tensors, plain values, and objects without tensors.

    `own` holds the ids of objects that belong to a module. With it, all other objects without
    tensors belong to the structure, and `unflatten` copies them.

    Raises:
        UnknownTreeError: an object cannot be copied.
    """
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves, own, ())


def _refuse_uncopied(constant: _Constant) -> None:
    """Refuse an object of which no further step could return its own, such as a generator.

    Raises:
        UnknownTreeError: it cannot be copied.
    """
    try:
        constant.make(iter(()))
    except Exception as error:
        kind = type(constant.value).__name__
        raise UnknownTreeError(kind, f"cannot be copied ({error})") from None


def _flatten(
    tree: Any, leaves: list[Any], own: Mapping[int, Any] | None, above: tuple[int, ...]
) -> Structure:
    values, spec = pytree.tree_flatten(tree, _is_size)  # of which pytree makes a plain tuple
    inner: list[_Object | _Constant | None] = []
    for value in values:
        if type(value) is torch.Size:
            inner.append(_Object(torch.Size, (), _flatten(([*value],), leaves, own, above)))
            continue
        if isinstance(value, (Tensor, *_PLAIN)) or not holds_tensors(value):
            if own is not None and _closes_over_tensors(value):
                kind = type(value).__name__
                raise UnknownTreeError(kind, "that leads to tensors of this step")
            known = own is None or isinstance(value, (Tensor, *_PLAIN, *_CLOSED))
            if known or id(value) in own:  # type: ignore[operator]
                inner.append(None)
                if own is not None and not isinstance(value, Tensor):  # known by their copies
                    value = own.get(id(value), value)
                leaves.append(value)
            else:
                inner.append(constant := _Constant(value))
                _refuse_uncopied(constant)
            continue
        if id(value) in above or len(above) > _DEPTH:
            raise UnknownTreeError(type(value).__name__, "holds itself")
        names, parts = _parts(value)
        content = _flatten(parts, leaves, own, (*above, id(value)))
        inner.append(_Object(type(value), names, content))
    return Structure(spec, tuple(inner))


def _closes_over_tensors(value: Any) -> bool:
    """Whether a function holds tensors, or is a method of one."""
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        held = [cell.cell_contents for cell in cells if cell != types.CellType()]
        return any(map(holds_tensors, (*held, value.__defaults__)))
    is_method = isinstance(value, (types.MethodType, types.BuiltinFunctionType))
    return is_method and isinstance(value.__self__, Tensor)


def _is_size(value: Any) -> bool:
    return type(value) is torch.Size


def _parts(value: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return the names of an object's attributes, and (its items or None, the attributes)."""
    kind: Any = type(value)
    items: Any = None
    if isinstance(value, dict):
        items = dict(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(value)
    elif kind.__new__ is not object.__new__ and not hasattr(value, "__dict__"):
        raise UnknownTreeError(kind.__name__, "cannot be copied")
    names = tuple(_attributes(value))
    return names, (items, *(getattr(value, name) for name in names))


def _attributes(value: Any) -> Iterator[str]:
    yield from getattr(value, "__dict__", ())
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name


def holds_tensors(value: Any) -> bool:
    """Return whether there is a tensor in a tree, or in the attributes of an object in it."""
    seen: set[int] = set()
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, Tensor):
            return True
        if isinstance(item, (*_PLAIN, *_CLOSED)) or id(item) in seen or depth > _DEPTH:
            continue
        seen.add(id(item))
        found: list[Any] = []
        if isinstance(item, Mapping):
            found += item.values()
        elif isinstance(item, (list, tuple, set, frozenset)):
            found += item
        found += (getattr(item, name) for name in _attributes(item))
        stack += ((part, depth + 1) for part in found)
    return False


def refilled(old: Any, new: Any) -> Any:
    """Give `old` the content of `new` and return it; return `new` if `old` cannot be changed."""
    plain = isinstance(new, (Tensor, *_PLAIN, *_CLOSED))
    if old is new or plain or type(old) is not type(new):
        return new
    if isinstance(old, tuple):
        parts = list(map(refilled, old, new))
        if len(old) == len(new) and all(map(operator.is_, parts, old)):
            return old
        return new
    if isinstance(old, dict):
        content = {k: refilled(old[k], v) if k in old else v for k, v in dict.items(new)}
        dict.clear(old)
        dict.update(old, content)
    elif isinstance(old, list):
        kept = [refilled(a, b) for a, b in zip(old, new, strict=False)]
        list.__setitem__(old, slice(None), [*kept, *list.__getitem__(new, slice(len(kept), None))])
    names = tuple(_attributes(new))
    for name in set(_attributes(old)).difference(names):
        object.__delattr__(old, name)
    for name in names:
        value = getattr(new, name)
        if hasattr(old, name):
            value = refilled(getattr(old, name), value)
        object.__setattr__(old, name, value)
    return old


@dataclass(frozen=True, slots=True)
class _Named:
    part: _Object | _Constant

    def __repr__(self) -> str:
        if isinstance(self.part, _Constant):
            return repr(self.part.value)
        return f"<{self.part.kind.__name__}: {', '.join(self.part.names)}>"
