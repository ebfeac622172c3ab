"""Which functions of the user run, and what they read from outside of their calls."""

import contextvars
import functools
import gc
import logging
import sys
import textwrap
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rkgb.capture.record import make_B
from rkgb.guards import CodeWatch, Sources, Watched
from rkgb.guards.holding import fields_of
from rkgb.guards.loads import ANY, OWN

SCALE = 2.0
_count = 0


def _sources(function):
    with CodeWatch(lambda: "path") as watch:
        function()
    return Sources.of(watch.seen.values())


def _told(function):
    return sorted(source.told for source in _sources(function).places.values())


def _scaled(x=1.0):
    return x * SCALE


def test_a_global_is_found_with_its_line_and_the_module_that_reads_it():
    found = _sources(_scaled)
    (key,) = (k for k, s in found.places.items() if s.name == "SCALE")
    source = found.places[key]
    assert source.told == f"global 'SCALE' of {__name__}"
    assert source.where.startswith("test_guards.py:")
    assert source.read() == 2.0
    assert found.paths[key] == {"path"}


def test_the_defaults_of_a_function_are_found():
    assert "the defaults of _scaled" in _told(_scaled)


def test_variables_around_a_function_are_found_for_the_one_that_ran():
    def made(n):
        def read():
            return n

        return read

    first, second = made([1]), made([2])
    found = [s for s in _sources(first).places.values() if s.told.startswith("variable 'n'")]
    assert [source.read() for source in found] == [[1]]
    assert second() == [2]


def test_a_variable_that_is_set_meanwhile_is_found():
    n = 0

    def count():
        nonlocal n
        n += 1

    found = [s for s in _sources(count).places.values() if s.told.startswith("variable 'n'")]
    assert [source.read() for source in found] == [1]


def test_what_libraries_run_is_passed_over():
    with CodeWatch(lambda: "") as watch:
        textwrap.dedent(" a")
        _scaled()
    assert [seen.code for seen in watch.seen.values()] == [_scaled.__code__]


def test_what_runs_apart_is_noted_apart():
    with CodeWatch(lambda: "") as watch:
        with watch.apart() as ran:
            _scaled()
        assert not watch.seen
        watch.add(ran)
    assert [seen.code for seen in watch.seen.values()] == [_scaled.__code__]


def test_a_trace_function_of_others_is_called_and_put_back():
    if sys.version_info >= (3, 12):
        pytest.skip("there no trace function is set")
    calls = []

    def trace(frame, _event, _arg):
        calls.append(frame.f_code.co_name)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with CodeWatch(lambda: "") as watch:
            _scaled()
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert "_scaled" in calls
    assert any(seen.code is _scaled.__code__ for seen in watch.seen.values())


def test_joined_sources_are_the_same_object_where_nothing_is_new():
    first, other = _sources(_scaled), _sources(lambda: _count)
    assert first.joined(_sources(_scaled)) is first
    joined = first.joined(other)
    assert {*joined.places} == {*first.places, *other.places}


class _Held:
    shared = 1.0

    def __init__(self):
        self.handle, self.t, self.other = object(), 1.0, 1.0


class _Slots:
    __slots__ = ("t",)

    def __init__(self):
        self.t = 1.0


class _Numbers(dict):
    pass


def _module():
    made = ModuleType("of_the_user")
    made.t = 1.0
    return made


def _set_items(value):
    value["t"] = 2.0


def _set(name):
    return lambda value: setattr(value, name, 2.0)


def _set_kind(name):
    return lambda value: setattr(type(value), name, 2.0)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (_Held, _set("t")),
        (_Slots, _set("t")),
        (_module, _set("t")),
        (lambda: type("Kind", (), {"t": 1.0}), _set("t")),
        (lambda: type("Kind", (), {"t": 1.0})(), _set_kind("t")),
        (lambda: _Numbers(t=1.0), _set_items),
        (lambda: SimpleNamespace(t=[1.0]), lambda value: value.t.append(1.0)),
        (lambda: {"deep": [{"t": 1.0}]}, lambda value: _set_items(value["deep"][0])),
        (lambda: _Held().__init__, lambda value: setattr(value.__self__, "t", 2.0)),
        (lambda: functools.partial(max, {"t": 1.0}), lambda value: _set_items(value.args[0])),
        (lambda: np.ones(2), lambda value: value.fill(2.0)),
    ],
)
def test_a_value_is_seen_to_change(make, change):
    value = make()
    watched = Watched(frozenset(("t",)))
    before = watched.worth(value)
    assert watched.holds()
    assert Watched(frozenset(("t",))).worth(value) == before
    change(value)
    assert not watched.holds()
    assert Watched(frozenset(("t",))).worth(value) != before


def test_attributes_of_an_object_that_nothing_asks_for_may_change():
    value = _Held()
    watched = Watched(frozenset(("t",)))
    watched.worth(value)
    value.other = 2.0
    assert watched.holds()


def test_two_partial_functions_are_not_alike():
    first, second = functools.partial(max, 1), functools.partial(max, 2)
    assert Watched().worth(first) != Watched().worth(second)
    assert Watched().worth(first) == Watched().worth(functools.partial(max, 1))


def test_tables_that_nobody_wrote_to_are_passed_over():
    table, other = {"a": object()}, {"a": object()}
    watched = Watched()
    for owner in (table, other):
        watched.entries(owner).note("a", owner["a"])
    assert watched.tables == [table, other]
    other["a"] = object()
    assert watched.holds([table])
    assert not watched.holds([other])
    assert not watched.holds()


def test_a_watch_that_has_rested_leaves_python_as_it_was() -> None:
    """Profile function, trace function and builtins; also where it rests several times."""
    before = sys.getprofile(), sys.gettrace(), getattr, hasattr
    with CodeWatch(lambda: "") as watch:
        own = sys.getprofile(), getattr
        for _ in range(3):
            with watch.resting():
                assert sys.getprofile() is before[0]
            assert (sys.getprofile(), getattr) == own
    assert (sys.getprofile(), sys.gettrace(), getattr, hasattr) == before


class Both:
    """An object from which two ways lead to the next one."""

    def __init__(self, following: Any) -> None:
        self.left = self.right = following


def test_objects_to_which_many_ways_lead_are_hashed_and_compared_once() -> None:
    last = [1]
    first: Any = last
    for _ in range(40):  # 2**40 ways
        first = Both(first)
    found = [Watched(frozenset({"left", "right"})).worth(first) for _ in range(2)]
    assert found[0] == found[1]
    assert len({*found}) == 1
    last[0] = 2
    assert Watched(frozenset({"left", "right"})).worth(first) != found[0]


def test_a_logger_leads_to_its_parents_and_not_to_all_loggers():
    own, other = (logging.getLogger(f"{__name__}.{n}.guarded") for n in ("own", "other"))
    around = logging.getLogger(__name__)
    watched = Watched(frozenset((ANY,)))  # as where Python reads attributes by whatever names
    watched.worth(own)
    assert not any(table is vars(other) for table in watched.tables)
    assert watched.holds()
    around.setLevel(7)
    assert not watched.holds()
    around.setLevel(logging.NOTSET)


class Comprehending(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(y * factor for factor in [i + 1.0 for i in range(3)] for y in (x, x.sin()))


def test_no_comprehension_is_looked_for_in_all_that_python_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gc, "get_referrers", None)  # it takes 0.1 s with a few libraries
    assert make_B(Comprehending(), torch.randn(3)).ops


class _NoClass:
    """As a library of C: what it does not have, `__class__` too, is an error of its own."""

    two = 2.0

    @property
    def __class__(self) -> Any:
        raise AttributeError("unknown variable '__class__'")


class _NoModule:
    __module__ = 3  # type: ignore[assignment]
    two = 2.0


def test_another_tensor_in_a_context_is_seen() -> None:
    held: contextvars.ContextVar[torch.Tensor] = contextvars.ContextVar("held")
    context, watched = contextvars.copy_context(), Watched()
    context.run(held.set, torch.ones(2))
    watched.worth(context)
    assert watched.holds()
    context.run(held.set, torch.ones(2))
    assert not watched.holds()


def test_fields_of_objects_without_a_module_are_found() -> None:
    assert not fields_of(_NoModule(), frozenset((OWN + "__doc__",)))


@pytest.mark.parametrize("kind", [_NoClass, _NoModule])
def test_objects_without_class_or_module_are_looked_at_by_their_type(kind: type) -> None:
    held = kind()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = held

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * held.two * self.held.two

    x = torch.ones(3, requires_grad=True)
    assert [op.name for op in make_B(Net(), x).ops] == ["mul", "mul_1"]
