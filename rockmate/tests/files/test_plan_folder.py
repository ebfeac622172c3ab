"""The folder of plans: a second start plans nothing, and nothing that differs is taken for it."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fake_cuda.allocator import AllocatorRules
from fake_cuda.device import fake_cuda
from rkgb.engine import Sample
from rockmate import PlanMismatchError, Rockmate
from rockmate.files.cache_folder import CacheFolder, usual_folder
from rockmate.files.plan_file import PlanFile
from rockmate.networks import network
from rockmate.requests import anew
from rockmate.requests.identity import cache_key
from rockmate.settings import Terms
from runs.planned import wrap as planned_by_all

SAMPLE = torch.randn(16, 8)


def wrap(model: nn.Module, sample: Any, budget: Any, **options: Any) -> Rockmate:
    """Plan by the fastest planner."""
    return planned_by_all(model, sample, budget, planner="segments", **options)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is searched and measured, as it happens."""
    found: list[str] = []

    def noting(function: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.append(what)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(anew, "plan_keeping", noting(anew.plan_keeping, "planned"))
    monkeypatch.setattr(network, "measure", noting(network.measure, "measured"))
    return found


def test_the_second_start_plans_nothing(tmp_path: Path, planned: list[str]) -> None:
    first = wrap(Net(), SAMPLE, 0.6, cache=tmp_path)
    assert planned == ["measured", "planned"]
    second = wrap(Net(), SAMPLE, 0.6, cache=tmp_path)
    assert planned == ["measured", "planned"]
    assert second.plan.steps == first.plan.steps
    assert second.budget_bytes == first.budget_bytes
    second(torch.randn(5, 8)).backward()  # follows from it, which takes no longer than a file
    assert len(list(tmp_path.iterdir())) == 1
    assert [row.how for row in second.plans] == ["planned", "resized"]
    assert planned == ["measured", "planned"]
    model = Net()
    model.body.append(torch.nn.Linear(8, 8))
    third = wrap(model, SAMPLE, 0.6, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert third.plans[0].how == "planned"


def test_a_plan_of_another_problem_is_made_anew(tmp_path: Path, planned: list[str]) -> None:
    def plan(model: nn.Module, folder: Path) -> Rockmate:
        return wrap(model, SAMPLE, "1MiB", cache=tmp_path / folder)

    longer = Net()
    longer.body.append(nn.Linear(8, 8))
    (ours,) = plan(Net(), Path("here")).plan_file().plans
    (other,) = plan(longer, Path("there")).plan_file().plans
    (kept,) = (tmp_path / "here").iterdir()
    wrong = replace(other, recording=ours.recording, costs=ours.costs)
    kept.write_text(replace(PlanFile.load(kept), plans=(wrong,)).to_json())
    before = len(planned)
    rk = plan(Net(), Path("here"))
    assert planned[before:] == ["measured", "planned"]
    assert rk.plan.steps == ours.plan.steps
    assert PlanFile.load(kept).plans[0].problem.fingerprint == ours.problem.fingerprint


@pytest.mark.slow
def test_whatever_matters_is_another_plan(tmp_path: Path, planned: list[str]) -> None:
    wrap(Net(), SAMPLE, "1MiB", cache=tmp_path)
    wrap(Net(), SAMPLE, "2MiB", cache=tmp_path)
    wrap(Net(), SAMPLE, "1MiB", cache=tmp_path, reserve=8)
    wrap(Net(), SAMPLE[:8], "1MiB", cache=tmp_path)
    wrap(Net().double(), SAMPLE.double(), "1MiB", cache=tmp_path)
    net = Net()
    net.body[0].requires_grad_(False)
    wrap(net, SAMPLE, "1MiB", cache=tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        wrap(Net(), SAMPLE, "1MiB", cache=tmp_path)
    torch.use_deterministic_algorithms(True)
    try:
        wrap(Net(), SAMPLE, "1MiB", cache=tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    assert planned.count("planned") == 8


def test_other_code_versions_and_choices_have_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).square().mean() + 0

    device, usual = torch.device("cpu"), Terms(0.5)
    keys = [cache_key("", Net(), device, usual), cache_key("", Other(), device, usual)]
    keys.append(cache_key("", Net(), device, Terms(0.5, effort="best")))
    monkeypatch.setattr(torch, "__version__", "9.9")
    keys.append(cache_key("", Net(), device, usual))
    assert len(set(keys)) == 4
    monkeypatch.undo()
    assert cache_key("", Net(), device, Terms(0.5, progress=True)) == keys[0]


def test_libraries_and_blocks_of_the_device_are_part_of_a_plan(
    tmp_path: Path, planned: list[str]
) -> None:
    usual, expandable = AllocatorRules(), AllocatorRules(expandable=True)
    others = ((expandable, "91002"), (usual, "91300"))
    with fake_cuda(usual):
        rk = wrap(Net(), SAMPLE, "1MiB", cache=tmp_path)
        rk.save_plan(tmp_path / "saved.json")
        wrap(Net(), SAMPLE, "1MiB", cache=tmp_path)
    assert planned.count("planned") == 1
    for made, ((rules, cudnn), told) in enumerate(zip(others, ("allocator", "cuDNN"), strict=True)):
        with fake_cuda(rules, cudnn=cudnn):
            wrap(Net(), SAMPLE, "1MiB", cache=tmp_path)
            assert planned.count("planned") == made + 2
            with pytest.raises(PlanMismatchError, match=f"{told}: ") as caught:
                wrap(Net(), SAMPLE, "1MiB", plan=tmp_path / "saved.json")
        assert len(caught.value.differences) == 1


def test_it_is_off_where_the_user_says_so(
    tmp_path: Path, planned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for value in ("off", "0", ""):
        monkeypatch.setenv("ROCKMATE_CACHE", value)
        assert CacheFolder.chosen(None) is None
    assert CacheFolder.chosen(True) == CacheFolder(usual_folder())
    monkeypatch.setenv("ROCKMATE_CACHE", str(tmp_path / "named"))
    assert CacheFolder.chosen(None) == CacheFolder(tmp_path / "named")
    assert CacheFolder.chosen(False) is None
    wrap(Net(), SAMPLE, "1MiB", cache=False)
    assert list(tmp_path.iterdir()) == []
    wrap(Net(), SAMPLE, "1MiB")
    assert len(list((tmp_path / "named").iterdir())) == 1


def test_each_platform_has_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("ROCKMATE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert usual_folder() == tmp_path / ".cache" / "rockmate"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert usual_folder() == tmp_path / "xdg" / "rockmate"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert usual_folder() == tmp_path / ".cache" / "rockmate"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert usual_folder() == tmp_path / "Library" / "Caches" / "rockmate"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert usual_folder() == tmp_path / "local" / "rockmate" / "Cache"
    assert CacheFolder.chosen(None) == CacheFolder(usual_folder())


@pytest.mark.slow
def test_what_cannot_be_read_or_written_is_no_error(tmp_path: Path, planned: list[str]) -> None:
    (tmp_path / "file").write_text("")
    wrap(Net(), SAMPLE, "1MiB", cache=tmp_path / "file")
    wrap(Net(), SAMPLE, "1MiB", cache=tmp_path / "file" / "inside")
    assert planned.count("planned") == 2
    wrap(Net(), SAMPLE, "1MiB", cache=tmp_path / "folder")
    (kept,) = (tmp_path / "folder").iterdir()
    for damage in (kept.read_text()[:-9], "", "{}", "\x00"):
        kept.write_text(damage)
        before = len(planned)
        wrap(Net(), SAMPLE, "1MiB", cache=tmp_path / "folder")
        assert len(planned) == before + 2
    PlanFile.load(kept)  # it was made anew


@pytest.fixture(scope="module")
def plans() -> PlanFile:
    return wrap(Net(), SAMPLE, "1MiB")._rockmate.plan_file()


def test_the_oldest_go_where_there_is_no_room(tmp_path: Path, plans: PlanFile) -> None:
    size = len(plans.to_json())
    folder = CacheFolder(tmp_path, most_bytes=3 * size)
    (tmp_path / "mine.txt").write_text("not a plan")
    for place, key in enumerate("abc"):
        assert folder.put(key, plans)
        os.utime(tmp_path / f"{key}.plan.json", (place, place))
    assert folder.get("a") == plans  # used last
    folder.put("d", plans)
    assert [folder.get(key) is not None for key in "abcd"] == [True, False, True, True]
    assert not CacheFolder(tmp_path, most_bytes=size - 1).put("e", plans)
    folder.clear()
    assert [place.name for place in tmp_path.iterdir()] == ["mine.txt"]


def test_writers_at_once_leave_whole_files(tmp_path: Path, plans: PlanFile) -> None:
    folder = CacheFolder(tmp_path, most_bytes=3 * len(plans.to_json()))

    def work(number: int) -> list[PlanFile | None]:
        folder.put(f"{number % 3}", plans)
        return [folder.get(f"{key}") for key in range(3)]

    with ThreadPoolExecutor(8) as pool:
        found = [one for row in pool.map(work, range(40)) for one in row]
    assert plans in found
    assert all(one is None or one == plans for one in found)
    assert not list(tmp_path.glob("*.part"))


def test_digests_do_not_depend_on_the_process(tmp_path: Path) -> None:
    model, other = Net(), copy.deepcopy(Net())
    keys = [wrap(one, SAMPLE, "1MiB")._rockmate.plan_file().plans[0] for one in (model, other)]
    assert keys[0].recording == keys[1].recording
    assert keys[0].costs.keys() == keys[1].costs.keys()
    assert Sample.of(model, SAMPLE).device == torch.device("cpu")
