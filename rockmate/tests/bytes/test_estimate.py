"""What is said before anything runs is what is measured afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rkgb
import rockmate
from rkgb.capture import record_sizes
from rkgb.engine import Sample, record
from rkgb.errors import DataDependentError, TraceError
from rockmate import (
    InfeasibleBudgetError,
    PlanFileError,
    PlanMismatchError,
    UnknownChoiceError,
    UnsupportedModuleError,
)
from rockmate.planning import Link
from rockmate.requests.anew import eager_peak_bytes
from runs.planned import wrap
from zoo.nets import hugging_face_gpt2, network

NETS = ["gpt", "resnet", "unet", "lstm", "tied", "transformer", "mixer", "uno"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_a_plain_step_takes_what_was_estimated(name: str) -> None:
    model, sample = network(name)
    said = rockmate.estimate(model, sample, device="cpu").activations_bytes
    assert abs(said - eager_peak_bytes(model, sample, None)) <= 0.02 * said


class Net(nn.Module):
    def __init__(self, width: int = 16, layers: int = 6) -> None:
        super().__init__()
        linear = [nn.Linear(width, width) for _ in range(layers)]
        self.body = nn.Sequential(*[nn.Sequential(a, nn.Tanh(), nn.Dropout(0.1)) for a in linear])

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


def test_a_model_on_meta_needs_no_memory_and_gives_the_same() -> None:
    real = rockmate.estimate(Net(), torch.randn(64, 16), device="cpu")
    with torch.device("meta"):
        bare = rockmate.estimate(Net(), torch.randn(64, 16), device="cpu")
    assert bare.sizes == real.sizes
    huge = 1 << 17  # 6 layers of 64 GiB
    with torch.device("meta"):
        found = rockmate.estimate(Net(huge), torch.randn(2, huge), device="cpu", points=1)
    assert found.parameters_bytes == 6 * 4 * (huge * huge + huge)
    assert found.sizes.uncalled == ("addmm", "mm")
    assert "workspace of addmm, mm" in found.notes[-1]


def test_bytes_of_what_is_resident() -> None:
    model = Net()
    model.body[0].requires_grad_(False)
    found = rockmate.estimate(model, torch.randn(8, 16), device="cpu", optimizer="adamw")
    one = 4 * (16 * 16 + 16)
    assert found.parameters_bytes == 6 * one
    assert found.gradients_bytes == 5 * one
    assert found.optimizer_bytes == 10 * one + 4 * 10  # and ten counters of steps
    assert found.sizes.inputs_bytes == 4 * 8 * 16
    assert found.total_bytes == 21 * one + 40 + 4 * 8 * 16 + found.activations_bytes
    assert rockmate.estimate(model, torch.randn(8, 16), optimizer="sgd").optimizer_bytes == 0


@pytest.mark.nightly
def test_the_curve_goes_from_nothing_to_the_smallest_budget() -> None:
    model, sample = Net(), torch.randn(64, 16)
    found = rockmate.estimate(model, sample, device="cpu", points=2)
    budgets = [point.budget_bytes for point in found.curve]
    assert budgets == sorted(budgets, reverse=True)
    assert len(budgets) == 3
    assert budgets[-1] == found.smallest_budget_bytes
    overheads = [point.overhead for point in found.curve]
    assert overheads[0] == 0 < overheads[-1]
    planned = wrap(model, sample, budgets[-1])
    assert planned.plan.overhead == pytest.approx(overheads[-1])
    with pytest.raises(InfeasibleBudgetError):
        found.at(budgets[-1] - 1)
    json.dumps(found.to_dict())


def test_the_recording_without_content_is_the_real_one() -> None:
    model, sample = network("gpt")
    step = record_sizes(model, sample)
    real = record(model, Sample.of(model, sample))
    ours, theirs = ((*basic.ops, *basic.backward) for basic in (step.basic, real))
    assert list(map(str, ours)) == list(map(str, theirs))
    for name, info in real.infos.items():
        found = step.basic.infos[name]
        assert (found.shape, found.dtype) == (info.shape, info.dtype)
        assert found.storage_bytes == info.storage_bytes
    drawn = [[op.is_random for op in basic.ops] for basic in (step.basic, real)]
    assert drawn[0] == drawn[1]
    assert any(drawn[0])


@pytest.mark.slow
def test_a_transformer_of_hugging_face_on_meta() -> None:
    tokens = torch.randint(0, 90, (2, 24))
    real = hugging_face_gpt2()
    call = {"input_ids": tokens, "labels": tokens}
    found = rockmate.estimate(real.to("meta"), call, device="cpu", points=1)
    peak = eager_peak_bytes(hugging_face_gpt2(), call, None)
    assert abs(found.activations_bytes - peak) <= 0.02 * peak


class Looks(nn.Module):
    def __init__(self, look: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.look = nn.Linear(4, 4), look

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y if self.look(x) is None else -y


@pytest.mark.parametrize(
    "look",
    [
        lambda x: bool(x.sum() > 0),
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: torch.nonzero(x),
        lambda x: int(x[0, 0]),
    ],
)
def test_what_looks_at_values_is_refused_with_its_line(look: Callable[[Tensor], Any]) -> None:
    with pytest.raises(DataDependentError, match=r"test_estimate\.py:\d+"):
        rockmate.estimate(Looks(look), torch.randn(3, 4), device="cpu")


def test_numbers_from_numbers_may_be_looked_at() -> None:
    model = Looks(lambda x: torch.tensor(3.0).item() + x.shape[0])
    assert rockmate.estimate(model, torch.randn(3, 4), device="cpu").activations_bytes > 0


def test_what_cannot_be_estimated_is_refused() -> None:
    with pytest.raises(UnknownChoiceError, match="optimizer 'adamx' is unknown"):
        rockmate.estimate(Net(), torch.randn(8, 16), optimizer="adamx")
    with pytest.raises(UnsupportedModuleError, match="no parameter of Net requires a gradient"):
        rockmate.estimate(Net().requires_grad_(False), torch.randn(8, 16))
    with pytest.raises(TraceError, match=r"reduction dim|mat1"):
        rockmate.estimate(Net(), torch.randn(8, 15), device="cpu")


# ---------------------------------------------------------------- recorded costs


@pytest.fixture(scope="module")
def measured() -> rockmate.Rockmate:
    return rockmate.Rockmate(Net(layers=3), torch.randn(64, 16), "1MiB", self_test=False)


def _costs_in(folder: Path, kind: str, measured: rockmate.Rockmate) -> Any:
    """Return what was measured as `cost=` takes it."""
    measured.save_plan(folder / "net.plan.json")
    if kind == "path of plans":
        return folder / "net.plan.json"
    if kind == "plans":
        return measured.plan_file()
    costs = rkgb.make_all_graphs(Net(layers=3), torch.randn(64, 16)).costs
    costs.save(folder / "costs.json")
    return costs if kind == "costs" else str(folder / "costs.json")


@pytest.mark.parametrize("kind", ["path of plans", "plans", "costs", "path of costs"])
def test_times_are_those_that_were_recorded(
    kind: str, tmp_path: Path, measured: rockmate.Rockmate
) -> None:
    cost = _costs_in(tmp_path, kind, measured)
    with torch.device("meta"):
        model, sample = Net(layers=3), torch.randn(64, 16)
    found = rockmate.estimate(model, sample, device="cpu", points=1, cost=cost)
    plain = rockmate.estimate(model, sample, device="cpu", points=1)
    if "plans" in kind:
        assert found.problem == measured.plan.problem
        assert found.step_ms == measured.plan.base_time_ms
    times = [node.fwd_time_ms for node in found.problem.nodes]
    assert times != [node.fwd_time_ms for node in plain.problem.nodes]
    assert found.activations_bytes == plain.activations_bytes
    assert found.at(0.7).overhead > 0
    assert "milliseconds recorded on cpu" in str(found)
    assert "of a plain step" in str(found)
    assert found.to_dict()["step_ms"] == found.step_ms
    assert plain.to_dict()["step_ms"] is None


def test_costs_of_something_else_are_refused(tmp_path: Path, measured: rockmate.Rockmate) -> None:
    cost = _costs_in(tmp_path, "path of plans", measured)
    with pytest.raises(PlanMismatchError, match=r"none for 'addmm' \(body\.0\.0, .* more"):
        rockmate.estimate(Net(layers=3), torch.randn(65, 16), device="cpu", cost=cost)
    nothing = rkgb.RecordedCosts({}, "cpu", "2.13")
    with pytest.raises(PlanMismatchError, match=r"recorded on cpu with torch 2.13\) have none"):
        rockmate.estimate(Net(layers=3), torch.randn(64, 16), device="cpu", cost=nothing)
    for asked in ("time", tmp_path / "none.json", 3):
        with pytest.raises(UnknownChoiceError, match=r"choose flops, or an rkgb\.FlopCost"):
            rockmate.estimate(Net(layers=3), torch.randn(64, 16), device="cpu", cost=asked)
    junk = tmp_path / "junk.json"
    for text in ("", "[1]", '{"format": "rkgb costs 2", "costs": 3}', "\ud800", "3"):
        junk.write_bytes(text.encode(errors="surrogatepass"))
        with pytest.raises((rkgb.InvalidGraphError, PlanFileError), match=r"no recording|cannot"):
            rockmate.estimate(Net(layers=3), torch.randn(64, 16), device="cpu", cost=junk)


def test_the_weight_of_a_byte_belongs_to_the_device() -> None:
    model, sample = Net(layers=3), torch.randn(64, 16)
    times = {}
    for weight in (0.0, 2.0, 200.0):
        cost = rkgb.FlopCost(flops_per_byte=weight, flops_per_op=0.0)
        found = rockmate.estimate(model, sample, device="cpu", cost=cost)
        assert found.step_ms is None
        times[weight] = found.problem.base_time_ms
    usual = rockmate.estimate(model, sample, device="cpu").problem.base_time_ms
    ops_ms = usual - times[2.0]  # of a thousand FLOPs each
    assert 0 < ops_ms < usual
    by_byte = (times[200.0] - times[0.0]) / 200
    assert times[2.0] == pytest.approx(times[0.0] + 2 * by_byte)


def test_a_few_operations_may_lack_a_cost() -> None:
    model, sample = Net(512, 3), torch.randn(512, 512)
    whole = rkgb.make_all_graphs(model, sample, cost="flops").costs
    heavy = {key: cost for key, cost in whole.costs.items() if cost.flops}
    few = rkgb.RecordedCosts(heavy, "cpu", "2.13")
    found = rockmate.estimate(model, sample, device="cpu", cost=few)
    assert found.sizes.missing
    assert "no cost was recorded for" in found.notes[-1]
    said = rockmate.estimate(model, sample, device="cpu", cost=whole)
    assert not said.sizes.missing
    assert found.step_ms == pytest.approx(said.step_ms, rel=0.1)


# ---------------------------------------------------------------------- batches


@pytest.mark.nightly
def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    model, memory = Net(), 300_000

    def sample(count: int) -> Tensor:
        return torch.randn(count, 16)

    found = rockmate.largest_batch(model, sample, memory, device="cpu")
    assert 0 < found.plain < found.batch

    def plain_bytes(count: int) -> int:
        return rockmate.estimate(model, sample(count), device="cpu").total_bytes

    assert plain_bytes(found.plain) <= memory < plain_bytes(found.plain + 1)
    above = rockmate.estimate(model, sample(found.batch + 1), device="cpu")
    assert above.sizes.resident_bytes + above.smallest_budget_bytes > memory
    assert found.estimate.sizes.resident_bytes + found.budget_bytes == memory
    planned = wrap(Net(), sample(found.batch), found.budget_bytes)
    assert planned.plan.overhead == pytest.approx(found.overhead)
    assert f"{found.batch} with a budget" in str(found)
    json.dumps(found.to_dict())
    few = rockmate.largest_batch(model, sample, memory, device="cpu", at_most=7)
    assert (few.plain, few.batch, few.overhead) == (7, 7, 0.0)


def _rows(count: int) -> Tensor:
    return torch.randn(count, 16)


def test_a_link_that_is_given_makes_plans_that_move(tmp_path: Path) -> None:
    net, x = Net(layers=2), torch.randn(256, 16)
    wrap(net, x, "1MiB", cost="measured").save_plan(tmp_path / "net.plan.json")
    how: dict[str, Any] = {
        "device": "cpu",
        "planner": "segments",
        "cost": tmp_path / "net.plan.json",
    }
    without = rockmate.estimate(net, x, **how)
    free, nothing = Link(1e12, 1e12), Link(1e12, 1e12, host_bytes=0)
    moved = rockmate.estimate(net, x, **how, offload=free)
    assert moved.smallest_budget_bytes < without.smallest_budget_bytes
    within = without.smallest_budget_bytes
    assert without.at(within).overhead > moved.at(within).overhead == pytest.approx(0, abs=1e-6)
    assert "GB/s" in moved.notes[-1]
    stays = rockmate.estimate(net, x, **how, offload=nothing)
    assert stays.smallest_budget_bytes == within
    assert stays.at(within).overhead <= without.at(within).overhead  # its plans are searched


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"offload": Link(1e6, 1e6)}, "recorded costs"),
        ({"offload": "host"}, "Link"),
        ({"offload": Link(1e6, 1e6), "host_budget": "1GB"}, "host_bytes"),
    ],
)
def test_a_link_without_times_is_refused(how: dict[str, Any], words: str) -> None:
    with pytest.raises(rockmate.ArgumentsError, match=words):
        rockmate.estimate(Net(), torch.randn(4, 16), **how)


def test_the_times_of_a_largest_batch_are_in_proportion_to_recorded_ones() -> None:
    model = Net(layers=3)
    costs = rkgb.make_all_graphs(model, _rows(64), cost="flops").costs
    slow = {key: replace(one, time_ms=10 * one.time_ms) for key, one in costs.costs.items()}
    recorded = {64: rkgb.RecordedCosts(slow, "cpu", "2.13")}
    how = {"device": "cpu", "at_most": 96}
    counted = rockmate.largest_batch(model, _rows, 70_000, **how)
    found = rockmate.largest_batch(model, _rows, 70_000, **how, cost=recorded)
    assert (found.plain, found.batch) == (counted.plain, counted.batch)
    assert found.plain < 64 < found.batch
    assert found.estimate.step_ms == pytest.approx(
        10 * counted.estimate.problem.base_time_ms, rel=0.02
    )
    assert found.overhead == pytest.approx(counted.overhead, rel=0.02)
    assert "recorded on cpu with torch 2.13, in proportion to a batch of 64" in str(found)
    assert "counted in FLOPs" in str(counted)
    few = rockmate.largest_batch(model, _rows, "1GB", device="cpu", at_most=64, cost=recorded)
    assert few.estimate.times.endswith("with torch 2.13"), "its own costs"


def test_a_link_makes_the_largest_batch_larger_or_faster() -> None:
    model = Net(layers=2)
    recorded = {64: rkgb.make_all_graphs(model, _rows(64), cost="flops").costs}
    how: dict[str, Any] = {"device": "cpu", "at_most": 90, "planner": "segments", "cost": recorded}
    without = rockmate.largest_batch(model, _rows, 40_000, **how)
    found = rockmate.largest_batch(model, _rows, 40_000, **how, offload=Link(1e12, 1e12))
    assert found.plain == without.plain < without.batch < found.batch == 90
    assert found.overhead < without.overhead
    with pytest.raises(rockmate.RockmateError, match="of largest_batch needs recorded costs"):
        rockmate.largest_batch(model, _rows, 70_000, offload=Link(1e12, 1e12))
    with pytest.raises(rockmate.RockmateError, match="largest_batch takes no offload='host'"):
        rockmate.largest_batch(model, _rows, 70_000, offload="host")


def test_a_kind_of_operation_that_is_slow_is_slow_at_other_batches(
    measured: rockmate.Rockmate,
) -> None:
    costs = rkgb.make_all_graphs(Net(layers=3), _rows(64), cost="flops").costs
    heavy = {key: replace(one, time_ms=one.flops / 1e3) for key, one in costs.costs.items()}
    recorded = {64: rkgb.RecordedCosts(heavy, "cpu", "2.13")}
    found = rockmate.largest_batch(
        Net(layers=3), _rows, "1GB", device="cpu", at_most=128, cost=recorded
    )
    linear = [node for node in found.estimate.problem.nodes if "addmm" in (node.op or node.name)]
    expected = [2 * 128 * 16 * 16 / 1e3] * 3  # but that bytes, few of which double, count too
    assert [node.fwd_time_ms for node in linear] == pytest.approx(expected, rel=0.05)
    with pytest.raises(PlanMismatchError, match="have none for"):  # they are of 64
        rockmate.largest_batch(
            *(Net(layers=3), _rows, "1GB"),
            **{"device": "cpu", "at_most": 2, "cost": {8: measured.plan_file()}},
        )


@pytest.mark.parametrize("cost", ["time", "net.plan.json", {}, {0: "flops"}, {"8": "x"}, 3])
def test_costs_of_a_batch_come_with_the_batch(cost: Any) -> None:
    with pytest.raises(UnknownChoiceError, match="choose flops, or costs by the batch"):
        rockmate.largest_batch(Net(), _rows, "1GB", device="cpu", cost=cost)


def test_where_not_even_one_sample_fits() -> None:
    def sample(count: int) -> Tensor:
        return torch.randn(count, 16)

    with pytest.raises(InfeasibleBudgetError, match="not even one sample fits") as caught:
        rockmate.largest_batch(Net(), sample, 1000, device="cpu")
    found = rockmate.largest_batch(Net(), sample, caught.value.minimum_bytes, device="cpu")
    assert found.batch == 1
