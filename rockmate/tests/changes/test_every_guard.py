"""Each kind of thing that a plan takes for granted of its module: a change of it is noticed."""

from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict, deque

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from rkgb.guards import CodeWatch, Sources
from rkgb.torch_api.patches import Patches
from rockmate.guards.module_watch import ModuleWatch

FACTOR, TABLE, NAMES = 1.0, {"depth": {"scale": 1.0}}, ["a"]
BESIDE = torch.ones(4)
OUTSIDE = nn.Linear(4, 4)


class _Config:
    def __init__(self):
        self.scale, self.inner = 1.0, types.SimpleNamespace(flag=True)


class _Object:
    """Holds what is no plain value, so that it counts by identity and by what is asked for."""

    def __init__(self):
        self.scale, self.opaque = 1.0, object()


HELD = _Object()


def _around(start):
    shift = start

    def add(x, times=1.0):
        return x * times + shift

    def change():
        nonlocal shift
        shift += 1

    return add, change


class _Part(nn.Module):
    """A linear layer that reads attributes."""

    of_class = 1.0

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("running", torch.zeros(4))
        self.number, self.flag, self.text = 1.0, True, "a"
        self.listed, self.queue, self.chosen = [1.0, [2.0]], deque([1.0]), {1.0}
        self.config, self.kept = _Config(), torch.zeros(4)
        self.function = functools.partial(torch.add, 1.0)
        self.own_add, self.change_around = _around(1.0)

    def forward(self, x):
        found = FACTOR + TABLE["depth"]["scale"] + len(NAMES) + HELD.scale + self.of_class
        return self.own_add(OUTSIDE(x) @ self.weight + BESIDE * found + self.running)


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.parts = _Part(), nn.Sequential(nn.Linear(4, 4), nn.GELU())

    def forward(self, x):
        return self.parts(self.first(x))


def _drop(table, name):
    del table[name]


def _reversed(net):
    net.parts._modules = {"1": net.parts[1], "0": net.parts[0]}


def _moved_to_end(net):
    net.parts._modules["0"] = net.parts._modules.pop("0")


def _set_default(net):
    net.first.own_add.__defaults__ = (2.0,)


def _set_class(net, base=nn.Linear):
    net.parts[0].__class__ = type("Other", (base,), {})


IN_MODULE = {
    "a number": lambda net: setattr(net.first, "number", 2.0),
    "a number of another type": lambda net: setattr(net.first, "number", 1),
    "the sign of zero": lambda net: setattr(net.first, "number", -0.0),
    "a flag": lambda net: setattr(net.first, "flag", False),
    "a text": lambda net: setattr(net.first, "text", "b"),
    "an attribute that is new": lambda net: setattr(net.first, "fresh", 1.0),
    "an attribute that is gone": lambda net: delattr(net.first, "text"),
    "attributes written at once": lambda net: vars(net.first).update(number=3.0),
    "the mode of a submodule": lambda net: net.parts[1].eval(),
    "an item of a list": lambda net: net.first.listed.append(1.0),
    "an item of a list in a list": lambda net: net.first.listed[1].append(1.0),
    "an item of a deque": lambda net: net.first.queue.append(2.0),
    "an item of a set": lambda net: net.first.chosen.add(2.0),
    "a value of a configuration": lambda net: setattr(net.first.config, "scale", 2.0),
    "one in a configuration": lambda net: setattr(net.first.config.inner, "flag", False),
    "what is bound in a partial": lambda net: setattr(
        net.first, "function", functools.partial(torch.add, 2.0)
    ),
    "a kept tensor": lambda net: setattr(net.first, "kept", torch.zeros(5)),
    "the kind of a kept tensor": lambda net: net.first.kept.requires_grad_(),
    "a class": _set_class,
    "a parametrization": lambda net: parametrize.register_parametrization(
        net.parts[0], "weight", nn.Identity()
    ),
    "a submodule": lambda net: setattr(net.parts, "0", nn.Identity()),
    "a submodule that is new": lambda net: net.parts.append(nn.GELU()),
    "a submodule that is gone": lambda net: _drop(net.parts._modules, "1"),
    "the order of submodules": _moved_to_end,
    "submodules in another table": _reversed,
    "a parameter": lambda net: setattr(net.first, "weight", nn.Parameter(torch.ones(4, 5))),
    "a parameter that is none": lambda net: setattr(net.parts[0], "bias", None),
    "a parameter that is new": lambda net: net.parts[1].register_parameter(
        "more", nn.Parameter(torch.ones(1))
    ),
    "a parameter that is shared": lambda net: setattr(net.parts[0], "weight", net.first.weight),
    "a frozen parameter": lambda net: net.first.weight.requires_grad_(False),
    "the data of a parameter": lambda net: setattr(net.first.weight, "data", torch.ones(2, 4)),
    "strides of a parameter": lambda net: setattr(
        net.first.weight, "data", torch.ones(4, 8)[:, ::2]
    ),
    "the type of a parameter": lambda net: net.first.double(),
    "a buffer": lambda net: setattr(net.first, "running", torch.zeros(1)),
    "a buffer that is new": lambda net: net.parts[1].register_buffer("more", torch.ones(1)),
    "a hook": lambda net: net.first.register_forward_hook(print),
    "a hook before": lambda net: net.first.register_forward_pre_hook(print),
    "a hook on gradients": lambda net: net.first.register_full_backward_hook(print),
    "a hook before gradients": lambda net: net.first.register_full_backward_pre_hook(print),
    "a hook that is written": lambda net: net.first._forward_hooks.update({7: print}),
    "hooks in another table": lambda net: setattr(
        net.first, "_forward_hooks", OrderedDict({7: print})
    ),
}
OUTSIDE_OF_IT = {
    "a global": lambda net, held: held.setitem(globals(), "FACTOR", 2.0),
    "a global that is gone": lambda net, held: held.delitem(globals(), "FACTOR"),
    "an item of a dict in a global": lambda net, held: held.setitem(TABLE["depth"], "scale", 2.0),
    "an item of a global list": lambda net, held: held.setitem(globals(), "NAMES", ["a", "b"]),
    "a global tensor": lambda net, held: held.setitem(globals(), "BESIDE", torch.ones(1)),
    "an attribute of a global": lambda net, held: held.setattr(HELD, "scale", 2.0),
    "a parameter of another module": lambda net, held: held.setitem(
        OUTSIDE._parameters, "bias", None
    ),
    "an attribute of a class": lambda net, held: held.setattr(_Part, "of_class", 2.0),
    "a method": lambda net, held: held.setattr(_Part, "forward", lambda self, x: x),
    "a variable around": lambda net, held: net.first.change_around(),
    "a default": lambda net, held: _set_default(net),
}


def _watched():
    net = _Net()
    with CodeWatch(lambda: "first") as watch:
        net(torch.ones(2, 4))
    watched = ModuleWatch(net)
    watched.read(Sources.of(watch.seen.values(), None, watch.library.values()))
    return net, watched


@pytest.mark.parametrize("kind", IN_MODULE)
def test_a_change_of_the_module_is_noticed(kind):
    net, watched = _watched()
    before = watched.now(None).state
    assert watched.now(None).state is before
    IN_MODULE[kind](net)
    assert watched.now(None).state is not before


@pytest.mark.parametrize("kind", OUTSIDE_OF_IT)
def test_a_change_outside_of_the_module_is_noticed(kind, monkeypatch):
    net, watched = _watched()
    before = watched.now(None).state
    assert watched.now(None).state is before
    OUTSIDE_OF_IT[kind](net, monkeypatch)
    assert watched.now(None).state is not before


@pytest.mark.parametrize("kind", [*IN_MODULE, *OUTSIDE_OF_IT])
def test_it_is_noticed_where_heads_cannot_be_read(kind, monkeypatch):
    monkeypatch.setattr("rkgb.torch_api.object_heads._can_be_read", False)
    net, watched = _watched()
    before = watched.now(None).state
    assert watched.now(None).state is before
    if kind in IN_MODULE:
        IN_MODULE[kind](net)
    else:
        OUTSIDE_OF_IT[kind](net, monkeypatch)
    assert watched.now(None).state is not before


def test_what_another_thread_replaces_for_a_while_is_no_change():
    _net, watched = _watched()
    before = watched.now(None)
    with Patches([(nn.Linear, "forward", print), (nn.Linear, "__call__", print)]):
        assert watched.now(None) is before
        watched.model.more = 1.0
        changed = watched.now(None).state
        del watched.model.more
    assert changed is not before.state
    assert watched.now(None).state is before.state


@pytest.mark.parametrize("kind", IN_MODULE)
def test_it_is_noticed_after_writes_that_change_nothing(kind):
    net, watched = _watched()
    before = watched.now(None).state
    for _ in range(12):
        for module in net.modules():
            vars(module)["training"] = vars(module).pop("training")
        assert watched.now(None).state is before
    IN_MODULE[kind](net)
    assert watched.now(None).state is not before


@pytest.mark.parametrize("name", ["_parameters", "_buffers", "_forward_hooks", "_modules"])
def test_a_table_that_takes_the_place_of_one_is_looked_at_from_then_on(name):
    net, watched = _watched()
    net.parts[0].register_forward_hook(print)
    before = watched.now(None)
    table = getattr(net.parts[0], name)
    setattr(net.parts[0], name, copy.copy(table))
    assert watched.now(None).state is before.state  # the same things, found by a new look
    getattr(net.parts[0], name)["more"] = None
    assert watched.now(None).state is not before.state


@pytest.mark.parametrize("kind", ["a submodule", "a parameter", "parameters in another table"])
def test_what_is_alike_is_looked_up_anew(kind):
    net, watched = _watched()
    before = watched.now(None)
    linear = net.parts[0]
    if kind == "a submodule":
        net.parts[0] = copy.deepcopy(linear)
    elif kind == "a parameter":
        linear.weight = nn.Parameter(linear.weight.detach().clone())
    else:
        linear._parameters = copy.deepcopy(linear._parameters)
    now = watched.now(None)
    assert now.state is before.state
    assert now is not before
    assert not now.is_of_the_same(before)
