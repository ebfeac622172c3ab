"""What the heads of Python's objects say, of many of them at once: in a tenth of the time.

A head holds the type of an object; that of a list, a set or a dict, how many entries it has; that
of a dict, a number that is another one after every write; that of a function, where its code and
its defaults are; that of a class, where its bases and its name are. Python 3.11
lays heads out as here; where it is found otherwise, by a trial at import, nothing is read, and
whoever asks looks at the objects one by one.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import CellType, FunctionType
from typing import Any

import numpy as np

_WORD = 8  # bytes
_TYPE, _VERSION = 8, 24  # where they are in a head
_COUNT: dict[type, int] = {dict: 16, list: 16, set: 24}
_FIELDS: dict[tuple[type, str], int] = {
    (FunctionType, "__name__"): 32,
    (FunctionType, "__qualname__"): 40,
    (FunctionType, "__code__"): 48,
    (FunctionType, "__defaults__"): 56,
    (FunctionType, "__kwdefaults__"): 64,
    (FunctionType, "__doc__"): 80,
    (FunctionType, "__module__"): 104,
    (FunctionType, "__annotations__"): 112,
    (CellType, "cell_contents"): 16,
    (partial, "func"): 16,
    (partial, "args"): 24,
    (partial, "keywords"): 32,
    (type, "__bases__"): 336,
    (type, "__mro__"): 344,
    (type, "__name__"): 848,
    (type, "__qualname__"): 864,
}
_LISTED, _OF_SET = (16, 24), (16, 24, 32, 40)  # how many items, and where they are
_LAST = 1 << 47  # no program has an address behind it

Heads = Callable[[], bytes]


def heads_of(
    objects: Sequence[Any],
    counted: Sequence[Any],
    written: Sequence[dict[Any, Any]],
    fields: Sequence[tuple[Any, str]] = (),
) -> Heads | None:
    """Return what reads the heads of objects, as bytes.

    They say the types of `objects`, the sizes of dicts, lists and sets, whether dicts were written,
    and which objects functions and the like have as attributes: the same bytes as long as these are
    the same. All must be kept alive. None where heads cannot be read, or one of the attributes is
    not in them.
    """
    places = [id(one) + _TYPE for one in objects]
    places += [id(one) + _COUNT.get(type(one), _COUNT[dict]) for one in counted]
    places += [id(table) + _VERSION for table in written]
    for owner, name in fields:
        places.append(id(owner) + (_place_of(owner, name) or _LAST))
    if not _can_be_read or any(place >= _LAST for place in places):
        return None
    words = _words(places)
    take = _memory().take
    return lambda: take(words).tobytes()


def items_of_all(containers: Sequence[list[Any] | set[Any]]) -> Callable[[], bool] | None:
    """Return what tells whether lists and sets hold the same objects in the same places still.

    All must be kept alive, and so must what they hold now. It also says no where what is in one has
    moved in memory. None where heads cannot be read.
    """
    if not _can_be_read:
        return None
    heads = [(id(c), _LISTED if type(c) is list else _OF_SET) for c in containers]
    outer = _words([start + place for start, places in heads for place in places])
    take = _memory().take
    known, found = (now := take(outer)).tobytes(), iter(now.tolist())
    inner = list[int]()
    for _, places in heads:
        *_, count, at = (next(found) for _ in places)
        # A set has pairs of an object and its hash, in as many places as its mask says.
        step, many = (_WORD, count) if places is _LISTED else (2 * _WORD, count + 1)
        inner += range(at, at + step * many, step)
    if any(place >= _LAST for place in inner):
        return None
    words = _words(inner)
    held = take(words).tobytes()
    # Where items are elsewhere by now, nothing may be read where they were.
    return lambda: take(outer).tobytes() == known and take(words).tobytes() == held


def _words(places: Sequence[int]) -> np.ndarray[Any, np.dtype[np.intp]]:
    return np.array([(place - _WORD) // _WORD for place in places], dtype=np.intp)


def has_in_head(owner: Any, name: str) -> bool:
    """Whether an attribute is one that `heads_of` can read."""
    return _place_of(owner, name) is not None


def _place_of(owner: Any, name: str) -> int | None:
    return _FIELDS.get((type if isinstance(owner, type) else type(owner), name))


def _memory() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the memory of this process, but for its first word."""
    held: Any = (ctypes.c_int64 * (_LAST // _WORD - 2)).from_address(_WORD)
    return np.frombuffer(held, dtype=np.int64)


class _Tried:
    """An object whose attributes are set in a loop, as Python does it fastest."""

    def __init__(self) -> None:
        self.value = 0


class _Other(_Tried):
    pass


def _may_be_tried() -> bool:
    is_known = sys.version_info[:2] == (3, 11) and sys.implementation.name == "cpython"
    is_longer = hasattr(sys, "gettotalrefcount")  # a build for debugging
    in_reach = id(None) < _LAST and id([]) < _LAST
    return is_known and in_reach and not is_longer and ctypes.sizeof(ctypes.c_void_p) == _WORD


def _is_as_expected() -> bool:
    one, table = _Tried(), dict.fromkeys("ab", 0)
    own, bound = vars(one), partial(int, "1", base=10)

    def function(value: int = 0, *, named: int = 0) -> object:
        return value, named, cell_of

    cell_of: Any = object()
    (cell,) = function.__closure__ or ()
    changing: Any = type("Changing", (_Tried,), {})
    owners = {FunctionType: function, CellType: cell, partial: bound, type: changing}
    listed, held = list[int](), set[int]()
    fields = [(owners[kind], name) for kind, name in _FIELDS]
    read = heads_of([one], [own, table, listed, held], [own, table], fields)
    assert read is not None

    def write() -> None:
        for number in range(40):
            before = read()
            one.value = number + 1000
            seen.add(before != read())

    seen: set[bool] = set()
    names = ("__name__", "__qualname__")
    write()
    changes: tuple[Callable[[], object], ...] = (
        lambda: table.update(a=1),
        lambda: table.__setitem__("c", 1),
        lambda: table.pop("c"),
        lambda: setattr(one, "more", 1),
        lambda: setattr(one, "__class__", _Other),
        lambda: setattr(function, "__code__", write.__code__.replace(co_freevars=("cell_of",))),
        lambda: setattr(function, "__defaults__", (1,)),
        lambda: setattr(function, "__kwdefaults__", {"named": 1}),
        lambda: setattr(cell, "cell_contents", 1),
        lambda: setattr(changing, "__bases__", (_Other,)),
        *(partial(setattr, changing, name, "other") for name in names),
        *(partial(setattr, function, name, "other") for name in (*names, "__doc__", "__module__")),
        lambda: setattr(function, "__annotations__", {}),
        lambda: listed.append(1),
        lambda: held.add(1),
        lambda: bound.__setstate__((float, bound.args, bound.keywords, {})),  # type: ignore[attr-defined]
        lambda: bound.__setstate__((float, ("2",), bound.keywords, {})),  # type: ignore[attr-defined]
        lambda: bound.__setstate__((float, bound.args, {"a": 1}, {})),  # type: ignore[attr-defined]
    )
    for change in changes:
        before = read()
        change()
        seen.add(before != read())
    return seen == {True} and read() == read()


def _are_items_as_expected() -> bool:
    many = [object() for _ in range(20)]  # a set of more than four has a table elsewhere
    lists = [many[:1], many[:5], many[:]]
    sets = [{*many[:1]}, {*many[:5]}, {*many}]
    containers: list[list[Any] | set[Any]] = [*lists, *sets]
    seen = set[bool]()

    def see(change: Callable[..., object], *args: object) -> None:
        still = items_of_all(containers)
        seen.add(still is not None and still())
        change(*args)
        seen.add(still is None or not still())

    for listed in lists:
        see(listed.__setitem__, -1, 0)
        see(listed.append, 1)
        see(listed.extend, many)
        see(listed.pop)
    for held in sets:
        see(held.add, 1)
        see(held.discard, 1)
        see(held.update, range(50))
        see(held.pop)
    return seen == {True}


_can_be_read = _may_be_tried()
_can_be_read = _can_be_read and _is_as_expected() and _are_items_as_expected()
