"""The command line: what it prints, its exit codes, and no traceback for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rockmate.command import main
from rockmate.files.plan_file import PlanFile
from rockmate.reports import plan_report

FACTORIES = """
import torch
from torch import nn


def net():
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*layers), torch.randn(64, 16)


def raises():
    raise RuntimeError("no data here")


def odd():
    return nn.Linear(2, 2)


number = 3
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in a folder with factories; return its exit code and what it wrote."""
    (tmp_path / "rockmate_factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "rockmate_factories", raising=False)

    def call(*words: str) -> tuple[int, str, str]:
        code = main(words)
        written = capsys.readouterr()
        assert "Traceback" not in written.err
        return code, written.out, written.err

    return call


def test_a_plan_may_be_made_for_a_whole_step(run: Run) -> None:
    words = ("plan", "rockmate_factories:net", "1GB", "--memory", "--optimizer", "sgd")
    code, text, _ = run(*words, "--cost", "flops")
    assert code == 0
    assert text.startswith("memory of a whole step:")
    assert "left to forward and backward" in text


def test_a_plan_is_made_shown_and_compared(run: Run, tmp_path: Path) -> None:
    make = ("plan", "rockmate_factories:net", "--cost", "flops")
    code, text, _ = run(*make, "60%", "--out", "a.json")
    assert code == 0
    assert "-- Plan" in text
    assert PlanFile.load(tmp_path / "a.json").model == "Sequential"
    code, text, _ = run(*make, "1048576", "--out", "b.json", "--json")
    assert code == 0
    assert json.loads(text)["overhead"] == 0
    code, text, _ = run("show", "a.json")
    assert code == 0
    assert "inputs: float32[64, 16]" in text
    code, text, _ = run("show", "a.json", "--json")
    assert json.loads(text)["plans"][0]["operations"] == 12
    code, text, _ = run("report", "a.json", "--out", "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert (code, "Sequential within" in page, "not run" in page) == (0, True, False)
    code, text, _ = run("compare", "a.json", "a.json")
    assert (code, "the same plan" in text) == (0, True)
    code, text, _ = run("compare", "a.json", "b.json", "--json")
    assert code == 0
    assert any("recomputed otherwise" in row for row in json.loads(text)["differences"])


def test_estimates(run: Run) -> None:
    code, text, _ = run("estimate", "rockmate_factories:net", "--points", "1", "--meta")
    assert code == 0
    assert "activations of a plain step" in text
    words = ("estimate", "rockmate_factories:net", "--points", "1", "--optimizer", "sgd", "--json")
    code, text, _ = run(*words)
    assert code == 0
    found = json.loads(text)
    assert found["optimizer_bytes"] == 0
    assert found["parameters_bytes"] == 6 * 4 * (16 * 16 + 16)


def test_a_page_is_asked_of_the_plan(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("plan", "rockmate_factories:net", "1MiB", "--cost", "flops", "--out", "a.json")

    def html(_: Any, path: str) -> None:
        Path(path).write_text("<html>")

    monkeypatch.setattr(plan_report.PlanReport, "html", html, raising=False)
    code, text, _ = run("report", "a.json", "--out", "a.html")
    assert (code, "written to a.html" in text) == (0, True)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("plan", "rockmate_factories:net", "10"), "could mean 10 bytes or 10 GB"),
        (("plan", "rockmate_factories:net", "1k"), "the budget must be at least"),
        (("plan", "rockmate_factories:net", "many"), "budget 'many' cannot be read"),
        (("plan", "rockmate_factories:net", "1MiB", "--effort", "none"), "effort 'none'"),
        (("plan", "rockmate_factories", "1MiB"), "write module:factory"),
        (("plan", "no_such_module:net", "1MiB"), "ModuleNotFoundError"),
        (("estimate", "rockmate_factories:none"), "has no 'none'"),
        (("estimate", "rockmate_factories:raises"), "raised RuntimeError: no data here"),
        (("estimate", "rockmate_factories:odd"), "returned type Linear; return a tuple"),
        (("estimate", "rockmate_factories:number"), "is of type int, and no function"),
        (("show", "none.json"), "cannot read the plan file"),
        (("show", "rockmate_factories.py"), "found no JSON"),
        (("compare", "none.json", "none.json"), "cannot read"),
        (("report", "rockmate_factories.py", "--out", "x.html"), "found no JSON"),
        (
            ("estimate", "rockmate_factories:net", "--device", "toaster"),
            "device 'toaster' is unknown",
        ),
        (
            ("estimate", "rockmate_factories:net", "--device", "cuda:99"),
            "device 'cuda:99' is unknown",
        ),
        (("plan", "no_such_module:net", "1MiB", "--out", "no/a.json"), "there is no folder 'no'"),
        (("plan", "no_such_module:net", "1MiB", "--out", "."), "it is a folder"),
    ],
)
def test_bad_input_is_said_in_one_line(run: Run, words: tuple[str, ...], text: str) -> None:
    code, out, err = run(*words)
    assert code == 1
    assert not out
    assert text in err
    assert err.startswith("rockmate: ")


def test_unknown_words_have_a_code_of_their_own(run: Run) -> None:
    for words in (("fly",), ("show",), ("estimate", "a:b", "--optimizer", "adamx")):
        with pytest.raises(SystemExit) as caught:
            run(*words)
        assert caught.value.code == 2


def test_without_words_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "say how two plans differ" in capsys.readouterr().err


def test_the_module_is_a_command() -> None:
    command = [sys.executable, "-m", "rockmate", "show", "none.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("rockmate: cannot read the plan file")


def test_a_wrong_name_is_answered_with_those_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "few_models.py").write_text("def small(): ...\n\n\ndef large(): ...\n")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "few_models:smal", "1MiB"]) == 1
    assert "choose one of small, large" in capsys.readouterr().err
    assert main(["plan", "few_model:small", "1MiB"]) == 1
    assert "Python files in this folder: few_models" in capsys.readouterr().err
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "__init__.py").touch()
    (tmp_path / "nets" / "wide.py").touch()
    assert main(["plan", "nets:wide_net", "1MiB"]) == 1
    assert "it has no functions, and these modules: nets.wide" in capsys.readouterr().err
