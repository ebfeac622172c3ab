"""One definition of arguments: the same names and defaults everywhere, others refused."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rkgb
import rockmate
import rotor
from rockmate import Settings
from rockmate.files.plan_file import PlanFile

SISTERS = (
    rockmate.Rockmate,
    rockmate.apply,
    rockmate.apply_to_blocks,
    rockmate.estimate,
    rockmate.largest_batch,
)
named = pytest.mark.parametrize("function", SISTERS, ids=lambda function: function.__name__)


def net() -> tuple[nn.Module, Tensor]:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(64, 32)


def called(function: Any, **keywords: Any) -> Any:
    model, sample = net()
    if function is rockmate.estimate:
        return function(model, sample, **keywords)
    if function is rockmate.largest_batch:
        return function(model, lambda n: torch.randn(n, 32), "1MB", **keywords)
    return function(model, sample, "1MiB", **keywords)


@named
def test_every_setting_is_a_keyword_of_every_function(function: Callable[..., Any]) -> None:
    shown = inspect.signature(function).parameters
    for setting in fields(Settings):
        assert shown[setting.name].kind is inspect.Parameter.KEYWORD_ONLY
        if setting.name != "cost":  # nothing is measured where nothing is run
            assert shown[setting.name].default == setting.default
    assert "kwargs" in shown
    names = list(shown)
    assert names[0] == "model"
    if function is not rockmate.largest_batch:
        assert names[1] == "sample"
        assert shown["samples"].default == ()
    if function not in (rockmate.estimate, rockmate.largest_batch):
        assert names[2] == "budget"


def test_the_function_that_is_shown_is_the_class_too() -> None:
    assert list(inspect.signature(rockmate.Rockmate.__init__).parameters)[1:] == list(
        inspect.signature(rockmate.Rockmate).parameters
    )


@named
@pytest.mark.parametrize(("wrong", "right"), [("efort", "effort"), ("kwarg", "kwargs")])
def test_a_misspelt_name_is_refused_with_the_nearest(
    function: Callable[..., Any], wrong: str, right: str
) -> None:
    with pytest.raises(TypeError, match=f"{function.__name__}.*'{wrong}'; did you mean '{right}'"):
        called(function, **{wrong: None})


@named
def test_a_name_like_none_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"'zzz'; rockmate\.Settings has the keywords"):
        called(function, zzz=1)


def test_what_is_missing_is_named_with_the_function() -> None:
    with pytest.raises(TypeError, match=r"Rockmate\(\) missing a required argument: 'sample'"):
        rockmate.Rockmate(net()[0])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Rockmate needs a budget: .* or memory='24GB'"):
        rockmate.Rockmate(*net())


def test_settings_are_handed_on_as_keywords(tmp_path: Path) -> None:
    settings = Settings(effort="balanced", cost="flops", cache=tmp_path, opaque=["0"])
    assert dict(**settings) == {
        **{"effort": "balanced", "cost": "flops", "cache": str(tmp_path), "opaque": ("0",)}
    }
    assert Settings(**settings) == settings
    rk = called(rockmate.Rockmate, **settings)
    assert list(rk.plan.opaque) == ["0"]
    assert list(tmp_path.glob("*.json"))
    settings = Settings(cost="flops", reserve=1000)
    more, less = called(rockmate.estimate, **settings), called(rockmate.estimate)
    assert more.smallest_budget_bytes == less.smallest_budget_bytes + 1000
    assert (
        more.at(more.smallest_budget_bytes).overhead == less.at(less.smallest_budget_bytes).overhead
    )
    wider = called(rockmate.largest_batch, cost="flops")
    narrower = called(rockmate.largest_batch, cost="flops", reserve=600_000)
    assert narrower.batch < wider.batch
    assert narrower.plain < wider.plain


def test_of_several_samples_the_largest_is_estimated() -> None:
    model, sample = net()
    one = rockmate.estimate(model, sample)
    assert rockmate.estimate(model, sample[:8], samples=[sample]).to_dict() == one.to_dict()


@pytest.mark.parametrize("function", [rockmate.estimate, rockmate.largest_batch])
@pytest.mark.parametrize("setting", [{"opaque": ["0"]}, {"compile": True}, {"plan": "a.json"}])
def test_what_an_estimate_cannot_know_is_refused(
    function: Callable[..., Any], setting: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"{function.__name__} takes no {next(iter(setting))}="):
        called(function, **setting)


def test_blocks_take_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    def block() -> nn.Sequential:
        layers = [(nn.Linear(32, 32), nn.Tanh(), nn.GELU()) for _ in range(3)]
        return nn.Sequential(*(layer for group in layers for layer in group))

    model, sample = nn.Sequential(*(block() for _ in range(4))), torch.randn(64, 32)
    twin = copy.deepcopy(model)
    settings = Settings(cost="flops", self_test="deterministic", progress=True, opaque=["1", "2.0"])
    plan = rockmate.apply_to_blocks(
        model, sample[:8], 0.9, samples=[sample, sample[:30]], **settings, reserve=100
    )
    assert [row.path for row in plan.rows] == ["0", "2", "3"]  # '1' runs whole
    assert "planned block by block" in capsys.readouterr().err
    assert plan.measured_peak_bytes + 100 <= plan.budget_bytes
    peak = max(_step_peak(twin, x) for x in (sample, sample[:30]))
    assert plan.budget_bytes <= peak + 100  # a fraction of the largest sample's
    for x in (sample, sample[:30], sample[:8]):
        found = [_step(network, x) for network in (model, twin)]
        assert all(map(torch.equal, *found))
    assert len(model[2]._rockmate.plans.families) >= 3  # made while planning


def _step(network: nn.Module, x: Tensor) -> list[Tensor]:
    network.zero_grad()
    network(x).square().sum().backward()
    return [parameter.grad for parameter in network.parameters() if parameter.grad is not None]


def _step_peak(network: nn.Module, x: Tensor) -> int:
    return rockmate.estimate(network, x).activations_bytes


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"compile": True}, "takes no compile=True: blocks that"),
        ({"opaque": ["9"]}, "opaque names '9', and Sequential has no such"),
        ({"in_flight": 0}, "in_flight 0 is no number"),
        ({"effort": "none"}, "effort 'none' is unknown"),
    ],
)
def test_blocks_refuse_what_they_cannot_do(wrong: dict[str, Any], text: str) -> None:
    model, sample = net()
    with pytest.raises(ValueError, match=text):
        rockmate.apply_to_blocks(model, sample, 0.9, **wrong)
    assert type(model) is nn.Sequential
    assert all(type(block) is nn.Sequential for block in model)


def test_a_plan_of_blocks_is_kept_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sample = net()
    made = rockmate.apply_to_blocks(model, sample, 1.0, cache=tmp_path)
    (kept,) = tmp_path.glob("*.plan.json")
    made.save_plan(tmp_path / "blocks.json")
    assert kept.read_text() == (tmp_path / "blocks.json").read_text()
    monkeypatch.setattr("rockmate.blockwise.planning.choose", None)  # nothing is searched
    again = rockmate.apply_to_blocks(model, sample, 1.0, cache=tmp_path)
    assert again.rows == made.rows
    assert again.restriction_ms == made.restriction_ms
    assert again.file == made.file
    with pytest.raises(TypeError):
        rockmate.apply_to_blocks(model, sample[:8], 1.0, cache=tmp_path)
    with pytest.raises(TypeError):
        rockmate.apply_to_blocks(model, sample, 1.0, cache=False)
    kept.write_text(kept.read_text().replace('"in_flight":1', '"in_flight":2'))
    with pytest.raises(TypeError):  # a damaged one is none
        rockmate.apply_to_blocks(model, sample, 1.0, cache=tmp_path)


def test_a_file_of_the_other_kind_is_refused_by_what_takes_it(tmp_path: Path) -> None:
    model, sample = net()
    rockmate.apply_to_blocks(model, sample, 1.0, compare=False).save_plan(tmp_path / "blocks")
    rockmate.remove(model)
    rockmate.Rockmate(model, sample, 1.0).save_plan(tmp_path / "module")
    with pytest.raises(rockmate.PlanFileError, match=r"which apply_to_blocks\(\.\.\., plan"):
        rockmate.Rockmate(model, sample, 1.0, plan=tmp_path / "blocks")
    with pytest.raises(rockmate.PlanFileError, match=r"which Rockmate\(\.\.\., plan"):
        rockmate.apply_to_blocks(model, sample, 1.0, plan=tmp_path / "module")
    found = PlanFile.load(tmp_path / "blocks", by_blocks=True)
    assert PlanFile.from_json(found.to_json()) == found


def test_strict_blocks_run_no_part_whole() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y * len(y.detach().numpy().tolist())

    model = nn.Sequential(*(nn.Sequential(Looking(), nn.Linear(32, 32)) for _ in range(2)))
    with pytest.raises(rkgb.RkgbError):
        rockmate.apply_to_blocks(model, torch.randn(4, 32), 1.0, strict=True)
    plan = rockmate.apply_to_blocks(model, torch.randn(4, 32), 1.0, cost="flops", compare=False)
    assert len(plan.rows) == 2


def test_rotor_takes_the_same_names_and_the_published_ones() -> None:
    shown = inspect.signature(rotor.Checkpointable).parameters
    assert list(shown)[:3] == ["model", "sample", "budget"]
    assert shown["max_plans"].default == Settings().max_plans
    model, sample = net()
    chk = rotor.Checkpointable(module=model, input=sample, mem_limit="1MiB")
    assert chk.mem_limit == 1 << 20
    assert rotor.Checkpointable(model, sample, budget="1MiB").mem_limit == 1 << 20
    with pytest.raises(TypeError, match="budget and mem_limit"):
        rotor.Checkpointable(model, sample, 1 << 20, mem_limit=1 << 20)
    with pytest.raises(TypeError, match="budgte"):
        rotor.Checkpointable(model, sample, budgte=1)
