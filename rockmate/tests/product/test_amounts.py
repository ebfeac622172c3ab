"""An amount of memory says the same from Python, YAML, the environment and the command line."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import nn

import rockmate
from rockmate.command import main
from rockmate.schedules.report import format_bytes
from rockmate.settings import parse_budget

yaml = pytest.importorskip("yaml", reason="trainers bring it")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainers
BUDGETS: dict[str, tuple[int | None, float | None]] = {
    "8G": (8 * 10**9, None),
    "8Gi": (8 << 30, None),
    "300k": (300_000, None),
    "1_000_000": (1_000_000, None),
    "0.6": (None, 0.6),
    "60%": (None, 0.6),
}
SWITCHES = {"RockmateCallback": "transformers", "LightningCallback": "lightning"}


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)]
    return nn.Sequential(*layers), torch.randn(128, 16)


@pytest.fixture(params=SWITCHES)
def switch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip(SWITCHES[request.param], reason="a test extra")
    for name in ("ROCKMATE_BUDGET", "ROCKMATE_MEMORY"):
        monkeypatch.delenv(name, raising=False)
    return resolve_name(f"rockmate.integrations.{request.param}")


@pytest.mark.parametrize("text", BUDGETS)
def test_yaml_and_the_environment_say_what_python_says(
    switch: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for written in (f"budget: {text}", f"budget: '{text}'"):  # YAML makes some of them numbers
        given = switch(**yaml.safe_load(written)).options["budget"]
        assert parse_budget(given) == BUDGETS[text]
    monkeypatch.setenv("ROCKMATE_BUDGET", text)
    assert parse_budget(switch().options["budget"]) == BUDGETS[text]


@pytest.mark.parametrize("name", ["budget", "memory"])
@pytest.mark.parametrize("text", ["8", "8 gigs", "0", "120%"])
def test_a_wrong_amount_is_refused_where_it_is_given(
    switch: Any, name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "could mean 8 bytes or 8 GB" if text == "8" else f"{name} '{text}'"
    with pytest.raises(rockmate.BudgetFormatError, match=message):
        switch(**{name: text})
    monkeypatch.setenv(f"ROCKMATE_{name.upper()}", text)
    with pytest.raises(rockmate.BudgetFormatError, match=message):
        switch()


@pytest.mark.parametrize("text", BUDGETS)
def test_the_command_line_says_what_python_says(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size_bytes, fraction = BUDGETS[text]
    given = size_bytes if fraction is None else fraction
    expected = rockmate.Rockmate(*network(), given, cost="flops", self_test=False).plan
    module = f"amounts_{len(text)}_{text[0]}"
    (tmp_path / f"{module}.py").write_text(Path(__file__).read_text("utf-8"), "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["plan", f"{module}:network", text, "--cost", "flops"]) == 0
    found = capsys.readouterr().out
    assert re.search(rf"budget +{format_bytes(expected.budget_bytes)}", found)
    assert re.search(rf"predicted peak +{format_bytes(expected.peak_bytes)}", found)


def test_the_command_line_plans_within_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, x = network()
    stepper = torch.optim.AdamW(model.parameters())
    with pytest.raises(rockmate.InfeasibleBudgetError) as refused:
        rockmate.Rockmate(model, x, memory="1kB", optimizer=stepper, cost="flops")
    least = refused.value.minimum_bytes
    module = f"amounts_{least}"
    (tmp_path / f"{module}.py").write_text(Path(__file__).read_text("utf-8"), "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    plan = ["plan", f"{module}:network"]
    rest = ["--memory", "--optimizer", "adamw", "--cost", "flops"]
    for text in (f"{least}", f"{least / 1e6}MB"):
        assert main([*plan, text, *rest]) == 0
        assert "state of adamw" in capsys.readouterr().out
    assert main([*plan, f"{least - 1}", *rest]) == 1
    assert f"takes at least {least} bytes" in capsys.readouterr().err
    assert main([*plan, "60%", *rest]) == 1
    assert "memory '60%' is a fraction" in capsys.readouterr().err
