"""What the forward's Python reads besides its arguments may change between calls."""

import abc
import copy
import decimal
import functools
import inspect
import logging
import numbers
import sys
import threading
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from rockmate import Rockmate

SCALE = 2.0
CONFIG = {"scale": 2.0, "deep": {"list": [1.0, 2.0]}}
ORDERED = OrderedDict(scale=2.0)
config = ModuleType("config_of_the_user")
config.SCALE = 2.0
sys.modules[config.__name__] = config


class Shared:
    scale = 2.0


@dataclass
class Options:
    scale: float = 2.0
    more: list[float] = field(default_factory=lambda: [2.0])


class Schedule:
    """Holds something besides numbers, as schedulers do."""

    def __init__(self):
        self.handle, self.t = object(), 2.0

    @property
    def now(self):
        return self.t

    @staticmethod
    def fixed():
        return SCALE

    def at(self):
        return self.t

    def __call__(self):
        return self.t


class WithSlots:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 2.0


SCHEDULE, OPTIONS, SLOTS = Schedule(), Options(), WithSlots()


def _set_global(value):
    global SCALE
    SCALE = value


def _cell():
    value = 2.0

    def get(_):
        return value

    def put(new):
        nonlocal value
        value = new

    return get, put


def _reached():
    state = {"n": 2.0}
    return lambda _: state["n"], functools.partial(state.__setitem__, "n")


def _decorated():
    state = {"n": 2.0}

    def scaled(function):
        @functools.wraps(function)
        def wrapper(net):
            return state["n"] * function(net)

        return wrapper

    return scaled(lambda _: 1.0), functools.partial(state.__setitem__, "n")


def _default(_, options=CONFIG):
    return options["deep"]["list"][1]


def _keyword_default(_, *, schedule=SCHEDULE):
    return schedule.t


_held = {"k": 2.0}
PARTIAL = functools.partial(lambda held: held["k"], _held)


def _imported(_):
    import config_of_the_user

    return config_of_the_user.SCALE


def _from_import(_):
    from config_of_the_user import SCALE

    return SCALE


def _by_text(_):
    return getattr(SCHEDULE, "t")  # noqa: B009


def _set(owner, name):
    return functools.partial(setattr, owner, name)


def _decimals(_):
    return float(decimal.Decimal(10) / decimal.Decimal(3))


def _bound():
    held = {"k": 2.0}
    return (lambda _, get=held.get: get("k")), functools.partial(held.__setitem__, "k")


def _logger(_):
    return logging.getLogger(f"{__name__}.{Net.__name__}").getEffectiveLevel() / 10


PLACES = {
    "global": (lambda _: SCALE, _set_global),
    "dict": (lambda _: CONFIG["scale"], functools.partial(CONFIG.__setitem__, "scale")),
    "dict of dicts": (_default, functools.partial(CONFIG["deep"]["list"].__setitem__, 1)),
    "ordered dict": (lambda _: ORDERED["scale"], functools.partial(ORDERED.__setitem__, "scale")),
    "class": (lambda _: Shared.scale, _set(Shared, "scale")),
    "dataclass": (lambda _: OPTIONS.scale, _set(OPTIONS, "scale")),
    "slots": (lambda _: SLOTS.scale, _set(SLOTS, "scale")),
    "object": (lambda _: SCHEDULE.t, _set(SCHEDULE, "t")),
    "method": (lambda _: SCHEDULE.at(), _set(SCHEDULE, "t")),
    "property": (lambda _: SCHEDULE.now, _set(SCHEDULE, "t")),
    "callable object": (lambda _: SCHEDULE(), _set(SCHEDULE, "t")),
    "static method": (lambda _: SCHEDULE.fixed(), _set_global),
    "module": (lambda _: config.SCALE, _set(config, "SCALE")),
    "import": (_imported, _set(config, "SCALE")),
    "import from": (_from_import, _set(config, "SCALE")),
    "getattr": (_by_text, _set(SCHEDULE, "t")),
    "keyword default": (_keyword_default, _set(SCHEDULE, "t")),
    "cell": _cell(),
    "reached from a cell": _reached(),
    "decorator": _decorated(),
    "partial": (lambda _: PARTIAL(), functools.partial(_held.__setitem__, "k")),
    "method written in C": _bound(),
    "context of decimals": (_decimals, lambda n: setattr(decimal.getcontext(), "prec", int(2 * n))),
    "level of a logger": (_logger, lambda n: logging.getLogger(__name__).setLevel(int(10 * n))),
    "local function": (lambda _: (lambda: next(SCALE for _ in range(1)))(), _set_global),
}


class Net(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.read = read

    def forward(self, x):
        return self.layers(x) * self.read(self)


def _step(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def _assert_alike(planned, twin, x):
    assert all(map(torch.equal, _step(planned, x), _step(twin, x)))


class Meta(type):
    scale = 2.0


class OfMeta(nn.Linear, metaclass=Meta):
    def forward(self, x):
        return super().forward(x) * type(self).scale


def test_an_attribute_of_the_class_of_a_class():
    net, x = OfMeta(8, 8), torch.randn(4, 8)
    planned, twin = Rockmate(net, x, 1.0, cost="flops"), copy.deepcopy(net)
    for value in (3.0, 2.0):
        Meta.scale = value
        _assert_alike(planned, twin, x)


def test_each_thread_has_its_own_numbers():
    here = threading.local()
    net, x = Net(lambda _: getattr(here, "scale", 2.0)), torch.randn(4, 8)
    planned, twin = Rockmate(net, x, 1.0, cost="flops"), copy.deepcopy(net)
    _assert_alike(planned, twin, x)

    def elsewhere():
        here.scale = 3.0
        return _step(planned, x), _step(twin, x)

    with ThreadPoolExecutor(1) as pool:
        ours, theirs = pool.submit(elsewhere).result()
    assert all(map(torch.equal, ours, theirs))
    _assert_alike(planned, twin, x)


@pytest.mark.parametrize("place", PLACES)
def test_what_is_read_may_change_between_calls(place):
    read, change = PLACES[place]
    net, x = Net(read), torch.randn(4, 8)
    twin = copy.deepcopy(net)
    change(2.0)
    try:
        planned = Rockmate(net, x, 1.0, cost="flops")
        for value in (3.0, 3.0, 2.0, 0.5):
            change(value)
            _assert_alike(planned, twin, x)
    finally:
        change(2.0)
    assert len(planned.plans) == 3


def test_what_nobody_reads_needs_no_plan():
    net, x = Net(lambda _: SCHEDULE.t), torch.randn(4, 8)
    twin, planned = copy.deepcopy(net), Rockmate(net, x, 1.0, cost="flops")
    CONFIG["scale"], SCHEDULE.handle = 5.0, object()
    _assert_alike(planned, twin, x)
    CONFIG["scale"] = 2.0
    assert len(planned.plans) == 1


def test_the_report_names_the_place_and_both_values():
    net, x = Net(lambda _: CONFIG["scale"]), torch.randn(4, 8)
    planned = Rockmate(net, x, 1.0, cost="flops")
    CONFIG["scale"] = 3.0
    _step(planned, x)
    CONFIG["scale"] = 2.0
    why = planned.plans[-1].why
    assert f"global 'CONFIG' of {__name__} (test_what_python_reads.py:" in why
    assert "was 2.0 and is 3.0" in why


def test_a_module_that_could_not_be_imported_may_come(monkeypatch):
    def read(_):
        try:
            import module_that_comes
        except ImportError:
            return 2.0
        return module_that_comes.SCALE

    net, x = Net(read), torch.randn(4, 8)
    twin, planned = copy.deepcopy(net), Rockmate(net, x, 1.0, cost="flops")
    _assert_alike(planned, twin, x)
    module = ModuleType("module_that_comes")
    module.SCALE = 3.0
    monkeypatch.setitem(sys.modules, module.__name__, module)
    _assert_alike(planned, twin, x)


class Abstract(abc.ABC):  # noqa: B024
    pass


class Derived(Abstract):
    pass


@pytest.mark.parametrize("kind", [Abstract, Derived])
def test_a_class_that_is_registered_with_an_abstract_one(kind):
    class Registered:
        pass

    held = Registered()
    net, x = Net(lambda _: 3.0 if isinstance(held, Abstract) else 2.0), torch.randn(4, 8)
    twin, planned = copy.deepcopy(net), Rockmate(net, x, 1.0, cost="flops")
    for change in (lambda: None, lambda: kind.register(Registered)):
        change()
        _assert_alike(planned, twin, x)
    numbers.Number.register(type("Other", (), {}))  # which has nothing to do with it
    _assert_alike(planned, twin, x)
    assert len(planned.plans) == 2


class HoldsAnObject(nn.Module):
    """A number beside things that count by identity, in an object that the module holds."""

    scale = 2.0

    def __init__(self):
        super().__init__()
        self.linear, self.schedule = nn.Linear(8, 8), Schedule()

    def forward(self, x):
        return self.linear(x) * self.schedule.t * self.scale


def test_a_number_in_an_object_that_a_module_holds():
    net, x = HoldsAnObject(), torch.randn(4, 8)
    twin, planned = copy.deepcopy(net), Rockmate(net, x, 1.0, cost="flops")
    for value in (3.0, 2.0):
        net.schedule.t = twin.schedule.t = value
        _assert_alike(planned, twin, x)


def test_an_attribute_of_the_class_of_a_module():
    net, x = HoldsAnObject(), torch.randn(4, 8)
    twin, planned = copy.deepcopy(net), Rockmate(net, x, 1.0, cost="flops")
    try:
        HoldsAnObject.scale = 3.0
        _assert_alike(planned, twin, x)
    finally:
        HoldsAnObject.scale = 2.0


def test_a_method_of_a_class_that_is_replaced(monkeypatch):
    net, x = HoldsAnObject(), torch.randn(4, 8)
    twin, planned = copy.deepcopy(net), Rockmate(net, x, 1.0, cost="flops")
    monkeypatch.setattr(HoldsAnObject, "forward", lambda self, x: self.linear(x) * 7)
    _assert_alike(planned, twin, x)


class Branches(nn.Module):
    """Reads a number on one of its ways only."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, scaled=False):
        return self.linear(x) * (_scaled() if scaled else 1)


def _scaled():
    return SCALE


def test_what_another_call_reads_is_looked_at_from_then_on():
    net, x = Branches(), torch.randn(4, 8)
    twin, planned = copy.deepcopy(net), Rockmate(net, x, 1.0, cost="flops")
    try:
        for value, scaled in ((2.0, True), (3.0, True), (3.0, False), (2.0, True)):
            _set_global(value)
            ours, theirs = planned(x, scaled=scaled), twin(x, scaled=scaled)
            assert torch.equal(ours, theirs)
            ours.sum().backward()
    finally:
        _set_global(2.0)


def test_a_copy_of_a_planned_module_looks_at_the_same_places():
    net, x = Net(lambda _: SCALE), torch.randn(4, 8)
    twin = copy.deepcopy(net)
    planned = copy.deepcopy(Rockmate(net, x, 1.0, cost="flops"))
    try:
        _set_global(3.0)
        _assert_alike(planned, twin, x)
    finally:
        _set_global(2.0)


Point = namedtuple("Point", "scale")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, True),
        (0.0, -0.0),
        (Point(2.0), Point(3.0)),
        (SimpleNamespace(scale=2.0), SimpleNamespace(scale=3.0)),
        ((2.0,), [2.0]),
    ],
)
def test_values_that_python_takes_for_equal_are_told_apart(first, second):
    held = {"value": first}

    def read(_):
        value = held["value"]
        value = getattr(value, "scale", value)
        value = value[0] if isinstance(value, tuple) else value
        return 5.0 if isinstance(value, (bool, list)) else value

    net, x = Net(read), torch.randn(4, 8)
    twin, planned = copy.deepcopy(net), Rockmate(net, x, 1.0, cost="flops")
    held["value"] = second
    ours, theirs = planned(x), twin(x)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours.signbit(), theirs.signbit())


class AsksPython(nn.Module):
    """Asks Python's own library, which reads `sys`, and for an attribute of the name `modules`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        count = len(inspect.signature(self.layer.forward).parameters)
        return self.layer(x) * count * sum(1 for _ in self.modules())


def test_an_import_elsewhere_needs_no_new_recording(monkeypatch, caplog):
    x, rk = torch.randn(4, 8), Rockmate(AsksPython(), torch.randn(4, 8), 1.0, cost="flops")
    rk(x).sum().backward()
    monkeypatch.setitem(sys.modules, "imported_later", ModuleType("imported_later"))
    with caplog.at_level(logging.DEBUG, "rockmate"):
        rk(x).sum().backward()
    assert "planning" not in caplog.text
