"""Each kind of value that a forward's Python reads: that it changes is noticed at the next call."""

from __future__ import annotations

import array
import collections
import contextvars
import copy
import ctypes
import enum
import functools
import importlib
import inspect
import logging
import math
import operator
import os
import statistics
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rkgb.guards import CodeWatch, Sources
from rockmate import Rockmate
from rockmate.guards.module_watch import ModuleWatch

Change = Callable[[], object]
Read = Callable[[], object]
MAKERS: dict[str, Callable[[], tuple[Read, Change]]] = {}


def of(name: str) -> Callable[[Callable[[], tuple[Read, Change]]], None]:
    return lambda maker: MAKERS.update({name: maker})


class Thing:
    """Is no record: it holds what is no plain value."""

    kind = 2.0

    def __init__(self, **more: Any) -> None:
        self.opaque = object()
        vars(self).update(more)

    def get(self) -> float:
        return 2.0


class Other(Thing):
    kind = 3.0


class Plain:
    value = 2.0


class OtherPlain:
    value = 3.0


class DictOfNames(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]

    __setattr__ = dict.__setitem__


class ListOfOurs(list[float]):
    pass


class FloatOfOurs(float):
    pass


class Meta(type):
    scale = 2.0


class WithMeta(metaclass=Meta):
    pass


class Middle(Thing):
    pass


class KeptBeside:
    """Keeps its values by object."""

    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    def __get__(self, owner: Any, _: Any = None) -> float:
        return self.of[owner]


class HasKeptBeside:
    value = KeptBeside()


@of("a missing attribute that getattr asks for")
def _() -> tuple[Read, Change]:
    thing = Thing()
    return lambda: getattr(thing, "late", 2.0), lambda: setattr(thing, "late", 3.0)


@of("a missing attribute that is caught")
def _() -> tuple[Read, Change]:
    held = types.SimpleNamespace(opaque=object())

    def read() -> float:
        try:
            return held.late
        except AttributeError:
            return 2.0

    return read, lambda: setattr(held, "late", 3.0)


@of("an attribute that hides one of the class")
def _() -> tuple[Read, Change]:
    thing = Thing()
    return lambda: thing.kind, lambda: vars(thing).update(kind=3.0)


@of("all attributes at once")
def _() -> tuple[Read, Change]:
    thing = Thing(value=2.0)
    return lambda: thing.value, lambda: setattr(thing, "__dict__", {"value": 3.0})


@of("the class of an object")
def _() -> tuple[Read, Change]:
    thing = Thing()
    return lambda: thing.kind, lambda: setattr(thing, "__class__", Other)


@of("the class of a record")
def _() -> tuple[Read, Change]:
    record = Plain()
    return lambda: record.value, lambda: setattr(record, "__class__", OtherPlain)


@of("an attribute of a class between")
def _() -> tuple[Read, Change]:
    middle = type("Between", (Thing,), {"__module__": __name__})
    leaf = type("Below", (middle,), {"__module__": __name__})()
    return lambda: leaf.kind, lambda: setattr(middle, "kind", 4.0)


@of("the classes below a class")
def _() -> tuple[Read, Change]:
    kind: Any = type("Child", (Middle,), {"__module__": __name__})
    thing = kind()
    return lambda: thing.kind, lambda: setattr(kind, "__bases__", (Other,))


@of("an attribute of a metaclass")
def _() -> tuple[Read, Change]:
    meta: Any = type("M", (Meta,), {"__module__": __name__})
    kind = meta("K", (), {"__module__": __name__})
    return lambda: kind.scale, lambda: setattr(meta, "scale", 3.0)


@of("an attribute of a function")
def _() -> tuple[Read, Change]:
    def read() -> Any:
        return vars_of.value

    def vars_of() -> None:
        pass

    vars_of.value = 2.0  # type: ignore[attr-defined]
    return read, lambda: setattr(vars_of, "value", 3.0)


@of("what a descriptor keeps elsewhere")
def _() -> tuple[Read, Change]:
    thing, kept = HasKeptBeside(), vars(HasKeptBeside)["value"].of
    kept[thing] = 2.0
    return lambda: thing.value, lambda: kept.update({thing: 3.0})


@of("a list far inside")
def _() -> tuple[Read, Change]:
    inside = [2.0]
    held: Any = {"a": [{"b": ({"c": [[[inside]]]},)}]}
    return lambda: held["a"][0]["b"][0]["c"][0][0][0][0], lambda: inside.append(3.0)


@of("the end of a chain of objects")
def _() -> tuple[Read, Change]:
    last = first = Thing(value=2.0, next=None)
    for _ in range(20):
        first = Thing(value=1.0, next=first)
    return lambda: (first.next, first.value), lambda: setattr(last, "value", 3.0)


@of("an object that holds itself")
def _() -> tuple[Read, Change]:
    thing = Thing(value=2.0)
    thing.held = [thing]  # type: ignore[attr-defined]
    return lambda: thing.held[0].value, lambda: setattr(thing, "value", 3.0)  # type: ignore[attr-defined]


@of("an item of a long list")
def _() -> tuple[Read, Change]:
    items = [2.0] * 2000
    return lambda: items[1500], lambda: items.__setitem__(1500, 3.0)


@of("an item of a long dict")
def _() -> tuple[Read, Change]:
    items = dict.fromkeys(range(2000), 2.0)
    return lambda: items[7], lambda: items.update({7: 3.0})


@of("the order of a dict")
def _() -> tuple[Read, Change]:
    items = {"a": 2.0, "b": 3.0}
    return lambda: next(iter(items.values())), lambda: items.update(a=items.pop("a"))


@of("what a proxy shows")
def _() -> tuple[Read, Change]:
    items = {"a": 2.0}
    shown = types.MappingProxyType(items)
    return lambda: shown["a"], lambda: items.update(a=3.0)


@of("what a view shows")
def _() -> tuple[Read, Change]:
    items = {"a": 2.0}
    shown = items.keys()
    return lambda: len(shown), lambda: items.update(b=3.0)


@of("an attribute of a list")
def _() -> tuple[Read, Change]:
    items: Any = ListOfOurs([1.0])
    items.scale = 2.0
    return lambda: items.scale, lambda: setattr(items, "scale", 3.0)


@of("an attribute of a number")
def _() -> tuple[Read, Change]:
    number: Any = FloatOfOurs(1.0)
    number.scale = 2.0
    return lambda: number.scale, lambda: setattr(number, "scale", 3.0)


@of("a dict whose items are attributes")
def _() -> tuple[Read, Change]:
    items = DictOfNames(inner=DictOfNames(scale=2.0))
    return lambda: items.inner.scale, lambda: setattr(items.inner, "scale", 3.0)


@of("a large array")
def _() -> tuple[Read, Change]:
    numbers = np.ones(4000)
    return lambda: numbers[5], lambda: numbers.__setitem__(5, 3.0)


@of("bytes that may be written")
def _() -> tuple[Read, Change]:
    numbers = bytearray(b"ab")
    return lambda: numbers[0], lambda: numbers.__setitem__(0, 3)


@of("an array of Python's")
def _() -> tuple[Read, Change]:
    numbers = array.array("d", [2.0])
    return lambda: numbers[0], lambda: numbers.__setitem__(0, 3.0)


@of("a number of C")
def _() -> tuple[Read, Change]:
    number = ctypes.c_double(2.0)
    return lambda: number.value, lambda: setattr(number, "value", 3.0)


@of("a variable of the context")
def _() -> tuple[Read, Change]:
    variable = contextvars.ContextVar("variable", default=2.0)
    return lambda: variable.get(), lambda: variable.set(3.0)


@of("an object of the standard library")
def _() -> tuple[Read, Change]:
    event = threading.Event()
    return lambda: event.is_set(), lambda: event.set()


@of("a mapping of the standard library")
def _() -> tuple[Read, Change]:
    maps = collections.ChainMap({}, {"a": 2.0})
    return lambda: maps["a"], lambda: maps.maps[0].update(a=3.0)


@of("a function that is registered for a type")
def _() -> tuple[Read, Change]:
    @functools.singledispatch
    def chosen(_: object) -> float:
        return 2.0

    thing = Thing()
    return lambda: chosen(thing), lambda: chosen.register(Thing, lambda _: 3.0)


@of("the code of a function")
def _() -> tuple[Read, Change]:
    def called() -> float:
        return 2.0

    return lambda: called(), lambda: setattr(called, "__code__", (lambda: 3.0).__code__)


@of("the code of a method")
def _() -> tuple[Read, Change]:
    kind: Any = type("K", (), {"__module__": __name__, "get": lambda self: 2.0})
    thing = kind()
    return lambda: thing.get(), lambda: setattr(kind.get, "__code__", (lambda self: 3.0).__code__)


@of("a default of a function that is only looked at")
def _() -> tuple[Read, Change]:
    def looked_at(value: float = 2.0) -> float:
        return value

    read = lambda: inspect.signature(looked_at).parameters["value"].default  # noqa: E731
    return read, lambda: setattr(looked_at, "__defaults__", (3.0,))


@of("the order of an ordered dict")
def _() -> tuple[Read, Change]:
    held = collections.OrderedDict(a=1.0, b=2.0)
    return lambda: next(iter(held.values())), lambda: held.move_to_end("a")


@of("what a partial calls")
def _() -> tuple[Read, Change]:
    bound: Any = functools.partial(max, 2.0, 1.0)
    return lambda: bound(), lambda: bound.__setstate__((max, (3.0,), {}, {}))


@of("what a function remembers")
def _() -> tuple[Read, Change]:
    held = {"value": 2.0}

    @functools.cache
    def remembered() -> float:
        return held["value"]

    remembered()
    held["value"] = 3.0

    def change() -> None:
        remembered.cache_clear()
        remembered()  # as often as before

    return lambda: remembered(), change


@of("what a weak reference leads to")
def _() -> tuple[Read, Change]:
    thing = Thing(value=2.0)
    weak = weakref.ref(thing)
    return lambda: weak().value, lambda: setattr(thing, "value", 3.0)  # type: ignore[union-attr]


@of("whether a weak reference leads anywhere")
def _() -> tuple[Read, Change]:
    things = [Thing()]
    weak = weakref.ref(things[0])
    return lambda: weak() is None, things.clear


@of("a value of an enumeration")
def _() -> tuple[Read, Change]:
    choice: Any = enum.Enum("Choice", {"FIRST": 2.0})
    return lambda: choice.FIRST.value, lambda: setattr(choice.FIRST, "_value_", 3.0)


@of("a sign that a class gets")
def _() -> tuple[Read, Change]:
    kind: Any = type("K", (), {"__module__": __name__})
    thing = kind()
    return lambda: bool(thing), lambda: setattr(kind, "__bool__", lambda self: False)


@of("a sign that a class has")
def _() -> tuple[Read, Change]:
    kind: Any = type("K", (), {"__module__": __name__, "__float__": lambda self: 2.0})
    thing = kind()
    return lambda: float(thing), lambda: setattr(kind, "__float__", lambda self: 3.0)


@of("how a descriptor reads")
def _() -> tuple[Read, Change]:
    reader: Any = type("R", (), {"__module__": __name__, "__get__": lambda self, own, kind: 2.0})
    kind: Any = type("K", (), {"__module__": __name__, "value": reader()})
    thing = kind()
    return lambda: thing.value, lambda: setattr(reader, "__get__", lambda self, own, kind: 3.0)


@of("an object in an array")
def _() -> tuple[Read, Change]:
    held = {"value": 2.0}
    items = np.array([held, None], dtype=object)
    return lambda: items[0]["value"], lambda: held.update(value=3.0)


@of("an array of a megabyte")
def _() -> tuple[Read, Change]:
    numbers = np.ones(130_000)
    return lambda: numbers[129_999], lambda: numbers.__setitem__(129_999, 3.0)


@of("an item of a very long dict")
def _() -> tuple[Read, Change]:
    items = dict.fromkeys(range(150_000), 2.0)
    return lambda: items[149_999], lambda: items.update({149_999: 3.0})


@of("whether a logger would log")
def _() -> tuple[Read, Change]:
    above, logger = logging.getLogger("above"), logging.getLogger("above.below")
    above.setLevel(logging.INFO)
    return lambda: logger.isEnabledFor(10), lambda: above.setLevel(logging.DEBUG)


@of("the number of threads of torch")
def _() -> tuple[Read, Change]:
    before = torch.get_num_threads()
    return lambda: torch.get_num_threads(), lambda: torch.set_num_threads(before + 1)


@of("a name of Python's own")
def _() -> tuple[Read, Change]:
    return lambda: round(2.5), lambda: globals().update(round=lambda _: 3)


@of("the environment, by a function that is kept")
def _() -> tuple[Read, Change]:
    read = os.getenv
    return lambda: read("OF_THE_USER"), lambda: os.environ.update(OF_THE_USER="3.0")


@of("the environment in a path")
def _() -> tuple[Read, Change]:
    os.environ["OF_A_PATH"] = "a"
    return lambda: os.path.expandvars("$OF_A_PATH"), lambda: os.environ.update(OF_A_PATH="b")


NAME = "val" + "ue"  # of attributes, as no code has it


@of("an attribute by a name that is made")
def _() -> tuple[Read, Change]:
    thing = Thing(value=2.0)
    return lambda: getattr(thing, NAME), lambda: vars(thing).update(value=3.0)


@of("a missing attribute by a name that is made")
def _() -> tuple[Read, Change]:
    thing = Thing()
    return lambda: hasattr(thing, NAME), lambda: vars(thing).update(value=3.0)


@of("an attribute of a class by a name that is made")
def _() -> tuple[Read, Change]:
    kind: Any = type("K", (), {"__module__": __name__, "value": 2.0})
    return lambda: getattr(kind, NAME), lambda: setattr(kind, "value", 3.0)


@of("a variable of a module by a name that is made")
def _() -> tuple[Read, Change]:
    module = types.ModuleType("of_the_user")
    module.value = 2.0  # type: ignore[attr-defined]
    return lambda: getattr(module, NAME), lambda: vars(module).update(value=3.0)


@of("a module by a name that is made")
def _() -> tuple[Read, Change]:
    module: Any = types.ModuleType("named_by_the_user")
    module.scale = 2.0
    sys.modules[module.__name__] = module
    name = "named_by" + "_the_user"
    return lambda: importlib.import_module(name).scale, lambda: setattr(module, "scale", 3.0)


@of("attributes as a dict")
def _() -> tuple[Read, Change]:
    thing = Thing(value=2.0)
    return lambda: vars(thing)[NAME], lambda: setattr(thing, "value", 3.0)


@of("attributes in a loop")
def _() -> tuple[Read, Change]:
    thing = Thing(value=2.0)
    return lambda: [v for v in thing.__dict__.values()], lambda: setattr(thing, "more", 3.0)  # noqa: C416


@of("attributes of a copy")
def _() -> tuple[Read, Change]:
    thing = Plain()
    thing.opaque, thing.value = object(), 2.0  # type: ignore[attr-defined]
    return lambda: vars(copy.copy(thing)), lambda: setattr(thing, "value", 3.0)


@of("what a getter is made for")
def _() -> tuple[Read, Change]:
    thing = Thing(inner=Thing(deep=2.0))
    read = operator.attrgetter("inner.deep")
    return lambda: read(thing), lambda: setattr(thing.inner, "deep", 3.0)  # type: ignore[attr-defined]


@of("what a caller is made for")
def _() -> tuple[Read, Change]:
    kind: Any = type("K", (), {"__module__": __name__, "make": lambda self: 2.0})
    thing, call = kind(), operator.methodcaller("make")
    return lambda: call(thing), lambda: setattr(kind, "make", lambda self: 3.0)


@of("what stands for a missing attribute")
def _() -> tuple[Read, Change]:
    def look(self: Any, name: str) -> Any:
        return self.__dict__[f"hidden_{name}"]

    kind: Any = type("K", (Thing,), {"__module__": __name__, "__getattr__": look})
    thing = kind(hidden_value=2.0)
    return lambda: thing.value, lambda: setattr(thing, "hidden_value", 3.0)


class _Reader(nn.Module):
    def __init__(self, read: Read) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.read()
        return x


def watched(read: Read) -> ModuleWatch:
    module = _Reader(read)
    with CodeWatch(lambda: "") as watch:
        module(torch.ones(1))
    found = ModuleWatch(module)
    assert not any(seen.outside for seen in watch.seen.values())
    found.read(Sources.of(watch.seen.values(), None, watch.library.values()))
    return found


LINEAR = nn.Linear(2, 2)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads, known = torch.get_num_threads(), {*globals()}
    yield
    torch.set_num_threads(threads)
    for name in globals().keys() - known:
        del globals()[name]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_change_is_noticed(kind: str) -> None:
    read, change = MAKERS[kind]()
    watch = watched(read)
    before = watch.now(None)
    assert watch.now(None) is before
    change()
    assert watch.now(None).state is not before.state


@pytest.mark.parametrize(
    ("owner", "name", "read"),
    [
        (math, "sqrt", lambda: math.sqrt(4.0)),
        (torch, "sigmoid", lambda: torch.sigmoid),
        (nn.functional, "gelu", lambda: nn.functional.gelu),
        (sys, "a_flag_of_ours", lambda: getattr(sys, "a_flag_of_ours", None)),
        (nn.functional, "gelu", lambda: nn.GELU()(torch.ones(1))),
        (nn.GELU, "forward", lambda: nn.GELU()(torch.ones(1))),
        (nn.Linear, "__call__", lambda: LINEAR(torch.ones(1, 2))),
        (nn.modules.linear, "F", lambda: LINEAR(torch.ones(1, 2))),
        (nn.functional, "linear", lambda: LINEAR(torch.ones(1, 2))),
        (torch, "layer_norm", lambda: nn.functional.layer_norm(torch.ones(1, 2), [2])),
        (torch.Tensor, "relu", lambda: torch.ones(1).relu()),
        (torch.Tensor, "__mul__", lambda: torch.ones(1) * 2),
        (torch.Tensor, "of_the_user", lambda: getattr(torch.ones(1), "of_the_user", None)),
        (statistics, "median", lambda: statistics.median([1.0])),
    ],
)
def test_what_is_set_in_a_library_is_noticed(
    owner: Any, name: str, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watched(read)
    before = watch.now(None)
    assert watch.now(None) is before
    monkeypatch.setattr(owner, name, lambda *_: 3.0, raising=False)
    assert watch.now(None).state is not before.state


def test_the_code_of_a_function_of_a_library_is_noticed() -> None:
    watch = watched(lambda: statistics.median([1.0]))
    before, code = watch.now(None), statistics.median.__code__
    try:
        statistics.median.__code__ = code.replace()
        assert watch.now(None).state is not before.state
    finally:
        statistics.median.__code__ = code


def test_what_nobody_asks_for_may_change() -> None:
    thing = Thing(value=2.0, step=0)
    watch = watched(lambda: thing.value)  # type: ignore[attr-defined]
    before = watch.now(None)
    thing.step = 1  # type: ignore[attr-defined]
    thing.more = 1  # type: ignore[attr-defined]
    assert watch.now(None) is before


def test_long_lists_that_nobody_reads_are_not_looked_into() -> None:
    watch = watched(lambda: None)
    watch.model.kept = [[float(number)] for number in range(2000)]  # type: ignore[assignment]
    before = watch.now(None)
    watch.model.kept[5].append(1.0)  # type: ignore[operator,index,union-attr]
    assert watch.now(None) is before
    watch.model.kept.append([])  # type: ignore[operator,union-attr]
    assert watch.now(None).state is not before.state


def test_steps_are_those_of_plain_pytorch() -> None:
    thing, x = Thing(), torch.randn(4, 8)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh() * getattr(thing, "late", 2.0) * thing.get()

    net = Net()
    twin, planned = copy.deepcopy(net), Rockmate(net, x, "1MiB", cost="flops")
    for number in range(6):
        if number == 4:  # after the looks at the first calls
            thing.late, thing.get = 3.0, lambda: 5.0  # type: ignore[attr-defined,method-assign]
        ours, theirs = planned(x), twin(x)
        ours.sum().backward()
        theirs.sum().backward()
        assert torch.equal(ours, theirs)
        for a, b in zip(planned.parameters(), twin.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert torch.equal(a.grad, b.grad)
