"""What a forward changes outside of its module, or uses up: at every step, as in plain PyTorch."""

import array
import copy
import functools
import itertools
import os
import queue
import random
import threading
import time
from collections import UserDict
from contextvars import ContextVar

import numpy as np
import pytest
import torch
from torch import nn

from oracles.training import assert_same_gradients
from rkgb import RkgbError, SideEffectError
from rockmate import InfeasibleBudgetError, Rockmate, RockmateError, apply_to_blocks
from runs.planned import wrap

NAME = "ROCKMATE_TEST_SCALE"


@functools.lru_cache
def _remembered(size):
    LOG.append(size)
    return 0.5 + len(LOG)


class World:
    """Everything outside of the modules, as it is when training begins."""

    def __init__(self):
        self.begin()

    def begin(self):
        global ITERATOR, COUNT, GENERATOR
        ITERATOR, COUNT = iter([0.5, 0.25, 2.0, 3.0]), 0.0
        GENERATOR = (float(n) for n in range(1, 9))
        HELD["iterator"] = itertools.count(1.0)
        HELD["next"], HELD["draw"] = iter([0.5, 0.25, 2.0, 3.0]).__next__, RANDOM.uniform
        RANDOM.seed(0)
        NUMPY.bit_generator.state = np.random.default_rng(0).bit_generator.state
        LOG.clear()
        CACHE.clear()
        Counting.calls = _own_count.calls = SLOTS.calls = 0
        USER_DICT["calls"] = ARRAY[0] = NUMBERS[0] = 0
        Scaled.calls = Scaled.held["calls"] = Telling.times = 0
        HELPER.ticks = LOCAL.calls = 0
        CONTEXT.set(0)
        _remembered.cache_clear()
        _reset()

    def state(self):
        calls = Counting.calls, _own_count.calls, SLOTS.calls, USER_DICT["calls"]
        numbers = ARRAY[0], NUMBERS[0], HELPER.ticks, LOCAL.calls, CONTEXT.get()
        calls += Scaled.calls, Scaled.held["calls"], Telling.times
        return COUNT, len(LOG), {**CACHE}, calls, numbers, RANDOM.getstate()


class Counting:
    calls = 0


class Telling:
    times = 0

    def __get__(self, *_):
        Telling.times += 1
        return float(Telling.times)


class Slots:
    __slots__ = ("calls",)


class Helper:
    def __init__(self):
        self.ticks, self.handle = 0, object()

    def tick(self):
        self.ticks += 1
        return float(self.ticks)


def _nonlocal():
    n = 0.0

    def count(_):
        nonlocal n
        n += 1
        return n

    def reset():
        nonlocal n
        n = 0.0

    return count, reset


ITERATOR, COUNT, GENERATOR = iter([1.0]), 0.0, iter([1.0])
HELD: dict = {}
RANDOM, NUMPY = random.Random(0), np.random.default_rng(0)
LOG: list = []
CACHE: dict = {}


def _own_count(_):
    _own_count.calls += 1
    return float(_own_count.calls)


OF_CLASSES = ("class of the module", "dict of the class of the module", "descriptor")


class Scaled(nn.Module):
    calls, held, told = 0, {"calls": 0}, Telling()

    def __init__(self, read):
        super().__init__()
        self.linear, self.read = nn.Linear(16, 16), read
        self.numbers, self.helper = iter([0.5, 0.25, 2.0, 3.0]), Helper()
        self.array = np.zeros(3)

    def forward(self, x):
        return self.linear(x) * self.read(self)


HELPER, SLOTS, USER_DICT = Helper(), Slots(), UserDict()
LOCAL, CONTEXT = threading.local(), ContextVar("calls", default=0)
ARRAY, NUMBERS = np.zeros(3), array.array("d", [0.0])
_counted, _reset = _nonlocal()
WORLD = World()


UNSET = ContextVar("unset")


@pytest.mark.parametrize("door", [Rockmate, apply_to_blocks])
def test_planning_sets_no_context_variable(door):
    """One without a value or a default is refused, as only tokens could take a value away."""

    class Counts(nn.Linear):
        def forward(self, x):
            UNSET.set(UNSET.get(0) + 1)
            return super().forward(x)

    model, x = nn.Sequential(*(Counts(8, 8) for _ in range(3))), torch.randn(4, 8)
    with pytest.raises(RkgbError if door is Rockmate else RockmateError) as refused:
        door(model, x, "1MB")
    assert UNSET.get(None) is None
    if door is Rockmate:
        assert "set it before (test_what_changes_by_use.py:" in str(refused.value)
        token = UNSET.set(0)
        planned = door(model, x, "1MB")
        assert UNSET.get() == 0
        planned(x)
        assert UNSET.get() == 3
        UNSET.reset(token)


def _count(_):
    global COUNT
    COUNT += 1
    return COUNT


def _log(_):
    LOG.append(1.0)
    return float(len(LOG))


def _keep(_):
    CACHE["calls"] = CACHE.get("calls", 0) + 1
    return float(CACHE["calls"])


def _count_calls(_):
    Counting.calls += 1
    return float(Counting.calls)


def _seeded(_):
    return torch.rand(1, generator=torch.Generator().manual_seed(int(next(HELD["iterator"]))))


def _slot(_):
    SLOTS.calls += 1
    return float(SLOTS.calls)


def _local(_):
    LOCAL.calls += 1
    return float(LOCAL.calls)


def _context(_):
    CONTEXT.set(CONTEXT.get() + 1)
    return float(CONTEXT.get())


def _user_dict(_):
    USER_DICT["calls"] += 1
    return float(USER_DICT["calls"])


def _of_class(module):
    type(module).calls += 1
    return float(module.calls)


def _held_by_class(module):
    module.held["calls"] += 1
    return float(module.held["calls"])


def _add_to(numbers):
    numbers[0] += 0.5
    return float(numbers[0])


READS = {
    "iterator": lambda _: next(ITERATOR),
    "method of an iterator": lambda _: HELD["next"](),
    "method of random.Random": lambda _: HELD["draw"](0.5, 1.5),
    "iterator in a dict": lambda _: next(HELD["iterator"]),
    "seed of a generator": _seeded,
    "random.Random": lambda _: RANDOM.random(),
    "numpy's Generator": lambda _: float(NUMPY.random()),
    "global counter": _count,
    "nonlocal counter": _counted,
    "list that grows": _log,
    "function that remembers": lambda _: _remembered(2),
    "dict": _keep,
    "attribute of a class": _count_calls,
    "attribute of a function": _own_count,
    "slot": _slot,
    "UserDict": _user_dict,
    "threading.local": _local,
    "ContextVar": _context,
    "numpy's array": lambda _: _add_to(ARRAY),
    "array": lambda _: _add_to(NUMBERS),
    "array of the module": lambda module: _add_to(module.array),
    "attribute of an object": lambda _: HELPER.tick(),
    "iterator of the module": lambda module: next(module.numbers),
    "object of the module": lambda module: module.helper.tick(),
    "class of the module": _of_class,
    "dict of the class of the module": _held_by_class,
    "descriptor": lambda module: module.told,
}


def _net(read):
    torch.manual_seed(0)
    outside = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU())]
    return nn.Sequential(*outside, Scaled(read), nn.GELU(), nn.Linear(16, 16))


def _train(model, x, steps=4):
    found = []
    for _ in range(steps):
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        found += [y.detach(), *(p.grad.clone() for p in model.parameters())]
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("budget", [1.0, 0.8])
@pytest.mark.parametrize("name", READS)
def test_every_step_changes_it_as_a_plain_step_does(name, budget):
    x = torch.randn(64, 16)
    WORLD.begin()
    expected = _train(_net(READS[name]), x)
    theirs = WORLD.state()
    WORLD.begin()
    before = WORLD.state()
    planned = Rockmate(_net(READS[name]), x, budget, cost="flops")
    assert WORLD.state() == before, "planning has left a trace"
    assert planned.plan.opaque == ("6",)
    assert all(map(torch.equal, _train(planned, x), expected))
    assert WORLD.state() == theirs
    # What else there is may read attributes of the class by these names.
    assert len(planned.plans) == 1 or name in OF_CLASSES


class Retaining(nn.Module):
    """Runs whole and once, as it asks for a gradient of what it computes."""

    def __init__(self, read):
        super().__init__()
        self.scaled = Scaled(read)

    def forward(self, x):
        self.kept = self.scaled(x)
        if self.kept.requires_grad:
            self.kept.retain_grad()
        return self.kept


def _line_of(file):
    return float(file.readline())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", READS)
def test_planning_calls_of_other_sizes_advances_nothing(name, monkeypatch):
    monkeypatch.setattr("rkgb.outside.known._changing", {})  # what other tests have shown
    monkeypatch.setattr("rkgb.outside.known._leading", {})

    def train(made):
        WORLD.begin()
        torch.manual_seed(0)
        model = made(Retaining(READS[name]))
        return [t for size in (8, 6, 8) for t in _train(model, torch.ones(size, 16), 1)]

    expected = train(lambda model: model)
    theirs = WORLD.state()
    sample = torch.randn(8, 16)
    ours = train(lambda model: Rockmate(model, sample, "1MiB", cost="flops", self_test=False))
    assert all(map(torch.equal, ours, expected))
    assert WORLD.state() == theirs


@pytest.mark.parametrize("read", [lambda _: next(GENERATOR), lambda _: _line_of(HELD["file"])])
def test_what_cannot_be_put_back_is_refused_at_the_first_call_that_uses_it(read, tmp_path):
    (tmp_path / "numbers").write_text("1.0\n2.0\n")
    WORLD.begin()
    with (tmp_path / "numbers").open() as HELD["file"]:
        late = Retaining(lambda module: read(module) if HELD["late"] else 1.0)
        HELD["late"] = False
        planned = Rockmate(late, torch.randn(8, 16), "1MiB", cost="flops", self_test=False)
        _train(planned, torch.ones(8, 16), 1)
        HELD["late"] = True
        with pytest.raises(SideEffectError, match="an open file, a generator or a queue"):
            planned(torch.ones(6, 16))
        assert (next(GENERATOR), _line_of(HELD["file"])) == (1.0, 1.0)


class Ticking(nn.Module):
    """Counts in an object of its own and in a dict of the world, and is computed again."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.helper = nn.Linear(16, 64), nn.Linear(64, 16), Helper()

    def forward(self, x):
        HELD["dict"]["calls"] += 1
        hidden = nn.functional.gelu(self.up(x)) * self.helper.tick() * HELD["dict"]["calls"]
        return self.down(hidden).tanh()


def test_what_is_replaced_after_planning_is_what_counts():
    torch.manual_seed(0)
    net, x = nn.Sequential(*(Ticking() for _ in range(3))), torch.randn(32, 16)
    twin = copy.deepcopy(net)
    HELD["dict"] = {"calls": 0}
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(net, x, 1000, cost="flops")
    planned = Rockmate(net, x, error.value.minimum_bytes, cost="flops")
    assert HELD["dict"]["calls"] == 0 == sum(part.helper.ticks for part in net)
    for model in (planned, twin):
        HELD["dict"] = {"calls": 0}
        model.found = _train(model, x)
    assert HELD["dict"]["calls"] == 12
    assert all(map(torch.equal, planned.found, twin.found))


def test_an_iterator_that_the_user_holds_is_the_one_that_advances():
    WORLD.begin()
    ours, x = ITERATOR, torch.randn(8, 16)
    planned = Rockmate(_net(READS["iterator"]), x, 1.0, cost="flops")
    assert ITERATOR is ours
    _train(planned, x, 1)
    assert next(ours) == 0.25


def test_a_generator_outside_is_refused_and_not_used():
    WORLD.begin()
    with pytest.raises(SideEffectError, match="generator"):
        Rockmate(_net(lambda _: next(GENERATOR)), torch.randn(8, 16), 1.0, cost="flops")
    assert next(GENERATOR) == 1.0


def _by_default(x, numbers=None):
    return x * next(numbers)


def _of_keyword(x, *, chance=None):
    return x * chance.random()


_by_default.__defaults__ = (itertools.count(1.0),)  # as `numbers=itertools.count(1.0)` would
_of_keyword.__kwdefaults__ = {"chance": random.Random(0)}


def _made_here():
    numbers = iter([0.5, 0.25])
    return lambda x, numbers=numbers: x * next(numbers)


class Applies(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.layer(x))


@pytest.mark.parametrize("function", [_by_default, _of_keyword, _made_here()])
def test_a_default_that_changes_by_being_used_is_refused_and_not_used(function):
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    before = repr(held), [copy.deepcopy(h) for h in held]
    with pytest.raises(SideEffectError, match=r"by_use\.py:\d+\) is by default a"):
        wrap(Applies(function), torch.randn(2, 4), 1.0)
    draw = {itertools.count: next, random.Random: random.Random.random}.get(type(held[0]), next)
    assert repr(held) == before[0]
    assert draw(held[0]) == draw(before[1][0])
    wrap(Applies(torch.tanh), torch.randn(2, 4), 1.0)  # planning others goes on


def _counting(net):
    seen = []

    def count(x, seen=seen, *, more=net):
        seen.append(1)
        more.append(1)
        return x * len(seen) + len(more)

    return count


def test_defaults_that_a_local_function_writes_to_are_as_in_plain_training():
    torch.manual_seed(0)
    found, x = [], torch.randn(8, 4)
    net = nn.Sequential(Applies(torch.tanh), Applies(torch.tanh))
    for wraps in (lambda n: n, lambda n: Rockmate(n, x, 50_000, cost="flops")):
        model = copy.deepcopy(net)
        model[1].function = _counting([])
        found.append(_train(wraps(model), x))
    assert all(map(torch.equal, *found))


def test_a_queue_is_refused_and_not_used():
    items = queue.Queue()
    items.put(2.0)
    with pytest.raises(SideEffectError, match=r"a queue \(Queue\)"):
        Rockmate(_net(lambda _: items.get_nowait()), torch.randn(8, 16), 1.0, cost="flops")
    assert items.get_nowait() == 2.0


def test_strict_names_the_place_and_the_line():
    WORLD.begin()
    text = r"(?s)module '6'.*uses the global 'ITERATOR' .*list_iterator.*by_use.py:\d+"
    with pytest.raises(SideEffectError, match=text):
        Rockmate(_net(READS["iterator"]), torch.randn(8, 16), 1.0, cost="flops", strict=True)
    text = r"(?s)module '6'.*sets the global 'COUNT' .*test_what_changes_by_use.py:\d+"
    with pytest.raises(SideEffectError, match=text):
        Rockmate(_net(_count), torch.randn(8, 16), 1.0, cost="flops", strict=True)


class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.times = nn.Linear(16, 16), []

    def forward(self, x):
        begin = time.perf_counter()
        result = self.linear(x)
        self.times.append(time.perf_counter() - begin)
        return result


def test_a_module_that_reads_the_clock_runs_whole_at_every_step():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(16, 16), nn.GELU(), Timed()), torch.randn(8, 16)
    twin, planned = copy.deepcopy(net), Rockmate(net, x, "1MiB", cost="flops")
    assert planned.plan.opaque == ("2",)
    assert all(map(torch.equal, _train(planned, x), _train(twin, x)))
    assert len(net[2].times) == 4
    assert len({*net[2].times}) > 1


def test_the_environment_is_a_guard(monkeypatch):
    monkeypatch.setenv(NAME, "2.0")
    net, x = _net(lambda _: float(os.environ[NAME])), torch.randn(8, 16)
    twin, planned = copy.deepcopy(net), Rockmate(net, x, 1.0, cost="flops")
    assert planned.plan.opaque == ()
    for value in ("3.0", "2.0"):
        monkeypatch.setenv(NAME, value)
        assert all(map(torch.equal, _train(planned, x, 1), _train(twin, x, 1)))
    assert len(planned.plans) == 2


class Advancing(nn.Module):
    """Its root advances an iterator between layers, which are planned by themselves."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6)
        )
        self.numbers = iter(range(1, 100))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh() * next(self.numbers)
        return x


def test_planning_the_layers_of_a_root_advances_nothing():
    torch.manual_seed(0)
    model, x = Advancing(), torch.randn(512, 16)
    twin = copy.deepcopy(model)
    with pytest.raises(InfeasibleBudgetError):
        wrap(model, x, 0.01)
    rk = wrap(model, x, 0.6)
    for _ in range(2):
        for net in (rk, twin):
            net.zero_grad()
            net(x).square().mean().backward()
        assert_same_gradients(model, twin)
    assert next(model.numbers) == next(twin.numbers) == 13


NOW = {"late": False, "scale": 1.0}  # leads to nothing else


class Again(nn.Module):
    """Runs whole, as a size follows from values, and is computed again in its backward."""

    def __init__(self, read):
        super().__init__()
        self.up, self.down, self.read = nn.Linear(8, 64), nn.Linear(64, 8), read

    def forward(self, x):
        x = x * (1 + len((x > 1e9).nonzero()))
        x = self.down(self.up(x).tanh())
        return x * _late(self.read) if NOW["late"] else x


def _late(read):
    return read(None)


def _around(read, monkeypatch):
    monkeypatch.setattr("rkgb.outside.known._changing", {})  # what other tests have shown
    monkeypatch.setattr("rkgb.outside.known._leading", {})
    torch.manual_seed(0)
    last = nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Again(read), nn.Tanh(), *last)
    NOW["late"] = False
    twin, x = copy.deepcopy(model), torch.randn(32, 8)
    planned = Rockmate(model, x, 0.75, cost="flops", planner="recompute_all", self_test=False)
    assert "run_Again_again" in planned.plan.source()
    return planned, twin


LATE = ("iterator", "iterator in a dict", "random.Random", "global counter", "nonlocal counter")


@pytest.mark.parametrize("name", [*LATE, "list that grows", "attribute of a function"])
def test_what_a_part_begins_to_use_later_is_used_once_a_step(name, monkeypatch):
    planned, twin = _around(READS[name], monkeypatch)
    states = []
    for net in (planned, twin):
        WORLD.begin()
        NOW["late"] = True
        net.found = _train(net, torch.ones(32, 8), 2)
        states.append(WORLD.state())
    assert all(map(torch.equal, planned.found, twin.found))
    assert states[0] == states[1]


def test_what_changes_before_the_backward_is_read_as_in_the_forward(monkeypatch):
    planned, twin = _around(lambda _: NOW["scale"], monkeypatch)
    for net in (planned, twin):
        NOW["late"], NOW["scale"] = True, 2.0
        y = net(torch.ones(32, 8))
        NOW["scale"] = 3.0
        y.sum().backward()
        assert NOW["scale"] == 3.0
    for ours, theirs in zip(planned.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_what_cannot_be_used_twice_is_refused_where_a_part_runs_again(monkeypatch):
    planned, _ = _around(lambda _: next(GENERATOR), monkeypatch)
    WORLD.begin()
    NOW["late"] = True
    y = planned(torch.ones(32, 8))
    with pytest.raises(SideEffectError, match="a generator"):
        y.sum().backward()
    assert next(GENERATOR) == 2.0  # the forward alone has used it


def _of_two_iterators(_):
    return next(HELD["next"].__self__) / next(HELD["iterator"])


def _of_a_generator_and_more(_):
    global COUNT
    COUNT += 1
    LOG.append(COUNT)
    return COUNT / next(HELD["iterator"]) / next(ITERATOR)


@pytest.mark.parametrize("ask", [_of_two_iterators, _of_a_generator_and_more])
def test_everything_that_one_function_changes_is_put_back(ask):
    WORLD.begin()
    net, x = Scaled(ask), torch.ones(32, 16)
    twin = copy.deepcopy(net)
    planned = Rockmate(net, x, 1_000_000, cost="flops")
    states = []
    for module in (planned, twin):
        if module is twin:
            WORLD.begin()
        module.found = _train(module, x, 3)
        states.append((WORLD.state(), next(ITERATOR), next(HELD["iterator"])))
    assert all(map(torch.equal, planned.found, twin.found))
    assert states[0] == states[1]
