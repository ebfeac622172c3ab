"""Plans in files: used without solver or measurement, or refused with what differs."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fake_cuda.device import fake_cuda
from oracles.training import assert_same_gradients
from rockmate import PlanFileError, PlanMismatchError, Rockmate
from rockmate.files.plan_file import PlanFile
from rockmate.networks import network
from rockmate.requests import anew
from rockmate.schedules.simulate import simulate
from runs.planned import wrap
from zoo.nets import TinyGPT

TOKENS = torch.randint(0, 120, (2, 16), generator=torch.Generator().manual_seed(0))


class Logits(TinyGPT):
    """Two layers on short texts."""

    def __init__(self) -> None:
        super().__init__(layers=2, width=16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(tokens, tokens)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Logits()


@pytest.fixture(scope="module")
def path(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("plans") / "net.plan.json"
    wrap(copy.deepcopy(model), TOKENS, 0.6).save_plan(where)
    return where


@pytest.fixture
def nothing_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing should be searched or measured")

    monkeypatch.setattr(anew, "plan_keeping", refuse)
    monkeypatch.setattr(network, "measure", refuse)


@pytest.mark.usefixtures("nothing_is_planned")
def test_a_plan_from_a_file_needs_no_solver_and_gives_eagers_bits(
    model: nn.Module, path: Path
) -> None:
    rk = Rockmate(copy.deepcopy(model), TOKENS, 0.6, plan=path)
    saved = PlanFile.load(path).plans[0]
    assert rk.plan.steps == saved.plan.steps
    assert rk.plan.peak_bytes == simulate(rk.plan.problem, rk.plan.steps).peak_bytes
    assert any(kind == "F" for kind, _ in rk.plan.steps[len(rk.plan.problem.nodes) :])
    assert rk.budget_bytes == saved.budget_bytes
    assert rk.measured_peak_bytes == saved.measured_peak_bytes
    plain = copy.deepcopy(model)
    for module in (rk, plain):
        torch.manual_seed(1)
        module(TOKENS).backward()
    assert_same_gradients(rk, plain)


def test_calls_of_another_kind_are_planned_and_saved_beside(
    model: nn.Module, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rk = wrap(copy.deepcopy(model), TOKENS, "1MiB", plan=path)
    rk(TOKENS[:1]).backward()
    assert len(rk.plans) == 2
    rk.save_plan(tmp_path / "two.json")
    assert len(PlanFile.load(tmp_path / "two.json").plans) == 2
    with monkeypatch.context() as patched:
        patched.setattr(anew, "plan_keeping", None)
        patched.setattr(network, "measure", None)
        samples = [TOKENS[:1]]
        again = wrap(
            copy.deepcopy(model), TOKENS, "1MiB", plan=tmp_path / "two.json", samples=samples
        )
    assert len(again.plans) == 2
    assert [row.peak_bytes for row in again.plans] == [row.peak_bytes for row in rk.plans]


@pytest.mark.slow
def test_the_file_is_not_needed_once_it_was_read(model: nn.Module, path: Path) -> None:
    rk = wrap(copy.deepcopy(model), TOKENS, 0.6, plan=path)
    for other in (copy.deepcopy(rk), pickle.loads(pickle.dumps(rk))):
        assert other._rockmate.settings.plan is None
        other(TOKENS).backward()


def test_what_differs_is_said(model: nn.Module, path: Path, tmp_path: Path) -> None:
    file, place = PlanFile.load(path), tmp_path / "elsewhere.json"

    def refused(other: nn.Module, text: str, tokens: torch.Tensor = TOKENS) -> tuple[str, ...]:
        with pytest.raises(PlanMismatchError, match=re.escape(text)) as caught:
            wrap(other, tokens, 0.6, plan=place)
        again = pickle.loads(pickle.dumps(caught.value))
        assert again.differences == caught.value.differences
        return caught.value.differences

    file.save(place)
    refused(copy.deepcopy(model), "input 0: int64[2, 16] in the file, int64[2, 8]", TOKENS[:, :8])
    other = copy.deepcopy(model)
    other.drop = nn.Identity()  # type: ignore[assignment]
    assert len(refused(other, "operations in the file")) == 2
    refused(copy.deepcopy(model).to(torch.bfloat16), "of wte, makes 2.00 KiB in the file, 1.00 KiB")
    refused(nn.Sequential(copy.deepcopy(model)), "model: Logits in the file, Sequential here")
    made_with = {**file.made_with, "torch": "9.9", "device": "a GPU", "threads": "77"}
    dataclasses.replace(file, made_with=made_with).save(place)
    found = refused(copy.deepcopy(model), f"torch: 9.9 in the file, {torch.__version__}")
    assert [text.split(":")[0] for text in found] == ["torch", "device", "threads"]
    with pytest.raises(PlanFileError, match="cannot read the plan file"):
        wrap(copy.deepcopy(model), TOKENS, 0.6, plan=tmp_path / "none.json")


def test_budgets_around_a_plan(model: nn.Module, path: Path) -> None:
    peak = PlanFile.load(path).plans[0].plan.peak_bytes
    with pytest.raises(PlanMismatchError, match=f"it needs {peak} bytes"):
        wrap(copy.deepcopy(model), TOKENS, peak - 1, plan=path)
    exact = wrap(copy.deepcopy(model), TOKENS, peak, plan=path)
    assert exact.plan.budget_bytes == peak
    assert exact.plan.bound_ms is not None
    wide = wrap(copy.deepcopy(model), TOKENS, "1GiB", plan=path)
    assert wide.plan.bound_ms is None
    assert wide.plan.status == "feasible"


def test_an_untested_plan_is_tested_where_it_is_used(
    model: nn.Module, path: Path, tmp_path: Path
) -> None:
    file = PlanFile.load(path)
    untested = dataclasses.replace(file.plans[0], measured_peak_bytes=None)
    dataclasses.replace(file, plans=(untested,)).save(tmp_path / "untested.json")
    place = tmp_path / "untested.json"
    tested = wrap(copy.deepcopy(model), TOKENS, 0.6, plan=place)
    assert tested.measured_peak_bytes == file.plans[0].measured_peak_bytes
    assert wrap(model, TOKENS, 0.6, plan=place, self_test=False).measured_peak_bytes is None


def test_whole_blocks_of_an_allocator(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(33, 33), nn.Dropout(0.2)) for _ in range(4)])
    sample = torch.randn(7, 33)
    with fake_cuda():
        first = wrap(copy.deepcopy(model), sample, 0.7)
        first.save_plan(tmp_path / "blocks.json")
        second = wrap(copy.deepcopy(model), sample, 0.7, plan=tmp_path / "blocks.json")
        assert second.plan.steps == first.plan.steps
        assert second.plan.peak_bytes == first.plan.peak_bytes
    with pytest.raises(PlanMismatchError):
        wrap(copy.deepcopy(model), sample, 0.7, plan=tmp_path / "blocks.json")


def test_opaque_pieces_are_measured_where_they_are(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Tanh())
    sample = torch.randn(4, 8)
    first = wrap(copy.deepcopy(model), sample, "1MiB", opaque=["1"])
    first.save_plan(tmp_path / "piece.json")
    second = wrap(copy.deepcopy(model), sample, "1MiB", opaque=["1"], plan=tmp_path / "piece.json")
    assert second.plan.opaque == ("1",)
    for module in (model, second):
        module(sample).sum().backward()
    assert_same_gradients(model, second)


# ---------------------------------------------------------------------- files that mean harm


def _signed(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    checksum = hashlib.sha256(canonical.encode()).hexdigest()
    return json.dumps({"rockmate_plans": 1, "checksum": checksum, "content": content})


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.sampled_from(["F0", "B0 F1", "__class__", [], {}, [[]], {"a": 1}, "\ud800", -1, 0]),
)


@given(data=st.data())
@settings(max_examples=60)
def test_a_mutated_file_is_refused_or_holds(path: Path, data: st.DataObject) -> None:
    content = json.loads(path.read_text())["content"]
    place: Any = content
    while True:  # walk to a random place, and put something else there
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inside = place[key]
        if not isinstance(inside, (dict, list)) or not inside or data.draw(st.booleans()):
            break
        place = inside
    what = data.draw(st.sampled_from(["replace", "drop", "twice", "nudge"]))
    if what == "drop":
        del place[key]
    elif what == "twice" and isinstance(place, list):
        place.insert(0, place[key])
    elif what == "nudge" and type(place[key]) is int:
        place[key] += data.draw(st.sampled_from([-1, 1, 1000]))
    elif what == "nudge" and isinstance(place[key], str):
        words = place[key].split()
        place[key] = " ".join(data.draw(st.permutations(words[-6:])) + words[:-6])
    else:
        place[key] = data.draw(_VALUES)
    try:
        found = PlanFile.from_json(_signed(content))
    except PlanFileError:
        return
    for saved in found.plans:  # what was read is a plan that holds
        timeline = simulate(saved.problem, saved.plan.steps)
        assert timeline.peak_bytes == saved.plan.peak_bytes <= saved.plan.budget_bytes


@given(place=st.integers(0, 1 << 30), byte=st.integers(0, 255), cut=st.booleans())
@settings(max_examples=60)
def test_a_damaged_file_is_refused(path: Path, place: int, byte: int, cut: bool) -> None:
    whole = path.read_bytes()
    place %= len(whole)
    damaged = whole[:place] if cut else whole[:place] + bytes([byte]) + whole[place + 1 :]
    try:
        found = PlanFile.from_json(damaged.decode("utf-8", errors="surrogateescape"))
    except PlanFileError:
        return
    assert found == PlanFile.load(path)  # the byte was what stood there, or a space for a space


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", "1", '{"rockmate_plans": true}', '{"rockmate_plans": 99}', "NaN"],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(PlanFileError):
        PlanFile.from_json(text)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "9" * 10_000])
def test_texts_that_would_exhaust_a_reader_are_refused(text: str) -> None:
    with pytest.raises(PlanFileError):
        PlanFile.from_json(text)
    with pytest.raises(PlanFileError):
        PlanFile.from_json('{"rockmate_plans":1,"checksum":"","content":' + text)


def test_a_field_of_the_wrong_type_is_named(path: Path) -> None:
    content = json.loads(path.read_text())["content"]
    content["plans"][0]["problem"]["nodes"][3]["bwd_peak_bytes"] = "many"
    with pytest.raises(PlanFileError, match=r"plans\[0\]\.problem\.nodes\[3\]\.bwd_peak_bytes"):
        PlanFile.from_json(_signed(content))
