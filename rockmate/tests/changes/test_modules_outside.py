"""Modules and tensors that the forward reads, and that belong to no submodule of its own."""

import copy
import weakref

import pytest
import torch
from torch import nn

from rkgb import TraceError
from rockmate import Rockmate


class Holder:
    """An object that is no module."""


def _made():
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8).eval())
    return made.requires_grad_(False)


TEACHER = _made()
TABLE = torch.ones(8)


class Net(nn.Module):
    """Calls a module that is not registered."""

    def __init__(self, find):
        super().__init__()
        self.a, self.find = nn.Linear(8, 8), find
        self.listed, self.holder = [_made()], Holder()
        self.holder.deep = {"teacher": _made()}
        vars(self)["hidden"] = _made()

    def forward(self, x):
        return self.find(self)(self.a(x))


def _in_a_closure():
    held = _made()
    return lambda _: held


PLACES = {
    "global": lambda: lambda _: TEACHER,
    "closure": _in_a_closure,
    "list": lambda: lambda net: net.listed[0],
    "object": lambda: lambda net: net.holder.deep["teacher"],
    "attribute": lambda: lambda net: net.hidden,
}


def _load(module):
    module.load_state_dict({n: 2 * v for n, v in module.state_dict().items()})


def _set_data(module):
    module[0].weight.data = 2 * module[0].weight.data


def _new_parameter(module):
    module[0].weight = nn.Parameter(2 * module[0].weight, requires_grad=False)


def _set(name, value):
    return lambda module: setattr(module[1], name, value)


def _replace(module):
    module[1] = nn.Identity()


CHANGES = {
    "eval": nn.Module.eval,
    "state loaded": _load,
    "other data": _set_data,
    "other parameter": _new_parameter,
    "attribute": _set("p", 0.9),
    "submodule": _replace,
    "one more": lambda module: module.append(nn.ReLU()),
    "hook": lambda module: module[0].register_forward_hook(lambda _module, _args, out: 3 * out),
    "buffer": lambda module: module[2].running_mean.add_(1),
    "forward": _set("forward", lambda x: 7 * x),
}
KINDS_AS_BEFORE = {"state loaded", "other data", "other parameter", "buffer"}


def _step(module, net, x, seed):
    torch.manual_seed(seed)
    net.zero_grad()
    y = module(x)
    y.square().sum().backward()
    return [y.detach().clone(), *(p.grad.clone() for p in net.parameters())]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", PLACES)
def test_it_may_change_between_steps(place, change, monkeypatch):
    x, found = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), []
    for is_planned in (False, True):
        monkeypatch.setitem(globals(), "TEACHER", _made())
        torch.manual_seed(2)
        net = Net(PLACES[place]())
        module = Rockmate(net, x, "1MiB", cost="flops") if is_planned else net
        steps = [_step(module, net, x, 0)]
        CHANGES[change](net.find(net))
        found.append([*steps, _step(module, net, x, 1), _step(module, net, x, 2)])
    for ours, theirs in zip(*found, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(found[0][0][0], found[0][1][0])
    assert len(module.plans) == (1 if change in KINDS_AS_BEFORE else 2)
    assert module.plan.opaque == ()


def test_the_reason_for_another_plan_names_it(monkeypatch):
    monkeypatch.setitem(globals(), "TEACHER", _made())
    net, x = Net(PLACES["global"]()), torch.randn(4, 8)
    planned = Rockmate(net, x, "1MiB", cost="flops")
    TEACHER[1].p = 0.9
    planned(x)
    why = planned.plans[-1].why
    assert why.startswith("attribute 'p' of module '1' in global 'TEACHER' of ")
    assert why.endswith("was 0.5 and is 0.9")


def test_one_that_wants_a_gradient_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(globals(), "TEACHER", _made().requires_grad_())
    net, x = Net(PLACES["global"]()), torch.randn(4, 8)
    with pytest.raises(TraceError, match=r"'2\.weight' of a Sequential that is none of its"):
        Rockmate(net, x, "1MiB", cost="flops")


class Kept(nn.Module):
    """Computes with a tensor that is neither parameter nor buffer."""

    def __init__(self, use):
        super().__init__()
        self.a, self.b, self.use = nn.Linear(8, 8), nn.Linear(8, 8), use
        self.kept = [torch.ones(8)]
        self.kept.append(self.kept[0][:4])

    def forward(self, x):
        return self.b(torch.relu(self.use(self, self.a(x))))


USES = {
    "arithmetic": lambda net, x: x * TABLE,
    "its number": lambda net, x: x * TABLE.mean().item(),
    "its elements": lambda net, x: x * TABLE.tolist()[0],
    "a decision": lambda net, x: x * (2.0 if TABLE[0] > 1 else 1.0),
    "a mask": lambda net, x: torch.cat([2 * x[:, TABLE > 1], x], 1)[:, :8],
    "in a list": lambda net, x: x * net.kept[0],
    "beside a view": lambda net, x: x * net.kept[0] + net.kept[1].sum(),
    "its data": lambda net, x: x * net.kept[0].data * net.kept[0].detach()[0],
}


def _in_place(net, by):
    for tensor in (TABLE, net.kept[0]):
        tensor.add_(by)


def _replaced(net, by):
    globals()["TABLE"] = TABLE + by
    net.kept[0] = net.kept[0] + by
    net.kept[1] = net.kept[0][:4]


def _data_replaced(net, by):
    for tensor in (TABLE, *net.kept):
        tensor.data = tensor.data + by


@pytest.mark.one_in(4)
@pytest.mark.parametrize("change", [_in_place, _replaced, _data_replaced])
@pytest.mark.parametrize("use", USES)
def test_a_kept_tensor_is_read_anew(use, change, monkeypatch):
    x, found = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), []
    for is_planned in (False, True):
        monkeypatch.setitem(globals(), "TABLE", torch.ones(8))
        torch.manual_seed(2)
        net = Kept(USES[use])
        module = Rockmate(net, x, "1MiB", cost="flops") if is_planned else net
        steps = []
        for by in (0, 1, 0, 1):
            if by:
                change(net, by)
            steps.append(_step(module, net, x, 0))
        found.append(steps)
    for ours, theirs in zip(*found, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(found[0][0][0], found[0][1][0])
    memory_of_its_own = use == "beside a view" and change is _data_replaced
    assert memory_of_its_own or len(module.plans) == 1
    assert module.plan.opaque == ()


def test_a_copy_of_a_planned_module_reads_its_own():
    x = torch.randn(4, 8)
    net = Kept(USES["in a list"])
    planned = Rockmate(net, x, "1MiB", cost="flops")
    other = copy.deepcopy(planned)
    net.kept[0].mul_(3)
    assert not torch.equal(planned(x), other(x))
    with torch.no_grad():
        assert torch.equal(other(x), other.b(torch.relu(other.a(x))))


def test_a_kept_tensor_that_nobody_holds_any_more_is_freed():
    x = torch.randn(4, 8)
    net = Kept(USES["in a list"])
    planned = Rockmate(net, x, "1MiB", cost="flops")
    for _ in range(4):  # the first are recorded
        gone = weakref.ref(net.kept[0])
        _replaced(net, 1)
        planned(x).sum().backward()
    assert gone() is None
    assert len(planned.plans) == 1
