"""Two recordings as one program, and torch's private names that keys are made with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor, nn

from rkgb.capture import make_B
from rkgb.costs import measure_resized, op_key
from rkgb.costs.op_costs import made_bytes
from rkgb.device.rng import KeptGenerators
from rkgb.engine import (
    B_to_D,
    D_to_S,
    Sample,
    external_values,
    measure,
    operations,
    record,
    runnable,
)
from rkgb.graphs import same_but_for_numbers, same_but_for_sizes
from rkgb.torch_api.private.autograd import keeps_graph
from rkgb.torch_api.private.flags import kernel_flags
from rkgb.torch_api.private.tables import same_kinds
from zoo.examples import EXAMPLES, example


class Net(nn.Module):
    def __init__(self, **numbers: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.p, self.scale, self.shift, self.dim, self.act = 0.1, 2.0, 1, 0, torch.tanh
        vars(self).update(numbers)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.act(self.linear(x)), self.p) * self.scale
        return y.roll(self.shift, 1).sum(self.dim) / 3


@pytest.mark.parametrize(
    ("numbers", "same"),
    [
        ({}, True),
        ({"scale": 3.0}, True),
        ({"p": 0.7}, True),
        ({"scale": 3}, False),  # another type is another operation
        ({"shift": 2}, False),  # a place, not a factor
        ({"dim": 1}, False),
        ({"act": torch.sigmoid}, False),
    ],
)
def test_only_numbers_in_arithmetic_may_differ(numbers: dict[str, Any], same: bool) -> None:
    x = torch.randn(4, 4)
    first, second = make_B(Net(), x), make_B(Net(**numbers), x)
    assert same_but_for_numbers(first, second) is same
    assert not same_but_for_numbers(first, make_B(Net(), torch.randn(5, 4)))


class Reshaped(nn.Module):
    def __init__(self, **numbers: Any) -> None:
        super().__init__()
        self.linear, self.p = nn.Linear(4, 4), 0.1
        vars(self).update(numbers)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.linear(x).view(-1, 2, 2).transpose(1, 2), self.p)
        return F.softmax(y.reshape(x.shape[0], -1) / x.shape[0], -1)


def test_sizes_may_differ_where_operations_do_not() -> None:
    first, larger = (make_B(Reshaped(), torch.randn(n, 4)) for n in (3, 70))
    assert same_but_for_sizes(first, larger)
    assert same_but_for_sizes(first, make_B(Reshaped(p=0.3), torch.randn(5, 4)))
    assert not same_but_for_sizes(first, make_B(Reshaped(), torch.randn(5, 4, requires_grad=True)))
    assert not same_but_for_sizes(first, make_B(Reshaped(p=0.0), torch.randn(5, 4)))
    assert not same_but_for_sizes(first, make_B(Net(), torch.randn(5, 4)))


def test_at_another_size_bytes_are_measured_and_times_scaled() -> None:
    model = Reshaped()
    samples = [torch.randn(n, 4) for n in (3, 300)]
    first, larger = (make_B(model, x) for x in samples)
    ops, other = (*first.ops, *first.backward), (*larger.ops, *larger.backward)
    known = measure(first, ops, external_values(first, model, (samples[0],)))
    external = external_values(larger, model, (samples[1],))
    found = measure_resized(larger, other, external, known, ops, first.infos)
    exact = measure(larger, other, external, times=False)
    assert found.costs.keys() == exact.costs.keys()
    assert found.callees == exact.callees
    for small, large in zip(ops, other, strict=True):
        before = known.costs[op_key(small, first.infos)]
        after, true = (m.costs[op_key(large, larger.infos)] for m in (found, exact))
        assert (after.workspace_bytes, after.flops) == (true.workspace_bytes, true.flops)
        assert after.time_ms >= before.time_ms


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_recording_meters_what_a_measurement_finds(name: str) -> None:
    model, sample = example(name)
    given = Sample.of(model, sample)
    graph = runnable(D_to_S(B_to_D(record(model, given, is_metered=True)))).graph
    basic, ops = graph.basic, operations(graph)
    exact = measure(basic, ops, external_values(basic, model, given.leaves), times=False)
    metered = [op for op in ops if op.name in basic.metered and basic.metered[op.name].is_of(op)]
    for op in metered:
        beside = basic.metered[op.name].peak_bytes - made_bytes(op, basic.infos)
        assert max(0, beside) == exact.costs[op_key(op, basic.infos)].workspace_bytes, str(op)
    assert len({op_key(op, basic.infos) for op in metered}) > len(exact.costs) / 5


class Checking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if not bool(torch.isfinite(y).all()):
            raise ValueError("not finite")
        return self.second(y.tanh()).mean()


def test_looks_at_values_do_not_disturb_what_is_metered() -> None:
    model, x = Checking(), torch.randn(6, 8)
    plain = record(model, Sample.of(model, x))
    metered = record(model, Sample.of(model, x), is_metered=True)
    assert same_but_for_sizes(plain, metered)
    names = {op.name: op for op in (*metered.ops, *metered.backward)}
    assert metered.metered
    assert all(ran.op is names[name] for name, ran in metered.metered.items())
    for ran in metered.metered.values():
        assert ran.peak_bytes >= made_bytes(ran.op, metered.infos)


def test_what_overwrites_was_not_metered() -> None:
    """An operation that is made to overwrite an argument is measured as it is then."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)
    basic = record(model, Sample.of(model, x), is_metered=True)
    metered = next(m for m in basic.metered.values() if m.op.target_name == "threshold_backward")
    assert metered.is_of(metered.op)
    assert not metered.is_of(replace(metered.op, writes=metered.op.inputs[:1]))
    assert not metered.is_of(replace(metered.op, args=metered.op.args[::-1]))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.requires_grad_(False),
        lambda t: setattr(t, "data", t.data.double()),
        lambda t: setattr(t, "data", t.data.t()),
        lambda t: setattr(t, "data", t.data[:2]),
    ],
)
def test_kinds_of_tensors_are_looked_at_quickly(change: Any) -> None:
    tensors = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    holds = same_kinds(tensors)
    assert holds()
    with torch.no_grad():
        tensors[0].mul_(2)
    assert holds()
    change(tensors[1])
    assert not holds()


@pytest.mark.filterwarnings("ignore:TF32")
def test_flags_that_choose_kernels() -> None:
    torch.set_float32_matmul_precision("highest")
    before = kernel_flags()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert kernel_flags() != before
    torch.set_float32_matmul_precision("high")
    try:
        assert kernel_flags() != before
    finally:
        torch.set_float32_matmul_precision("highest")
    with torch.backends.mkldnn.flags(enabled=False):
        assert kernel_flags() != before
    with torch.device("meta"):
        assert kernel_flags() != before
    assert kernel_flags() == before


def test_a_backward_knows_whether_its_graph_is_kept() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = (x * 2).sum()
    x.register_hook(lambda _: seen.append(keeps_graph()))
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [True, False]


def test_generators_are_kept_and_put_back() -> None:
    kept = KeptGenerators.keep(torch.device("cpu"))
    drawn = torch.rand(3)
    kept.restore()
    assert torch.equal(torch.rand(3), drawn)
