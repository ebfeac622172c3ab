"""Each example runs at a tiny size, is short, and says what was measured."""

from __future__ import annotations

import ast
import importlib.util
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1]
FILES = sorted(EXAMPLES.glob("*.py"))
SPREAD = ("ddp", "fsdp2")  # over processes
NEEDS = {
    "hugging_face_trainer": ("transformers", "accelerate"),
    "lightning_trainer": ("lightning",),
    "timm_images": ("timm",),
    "lora": ("transformers", "peft"),
}


def test_they_are_all_here() -> None:
    assert [path.stem for path in FILES] == [
        *("ddp", "diffusion_unet", "fsdp2", "gpt_from_scratch", "hugging_face_trainer"),
        *("lightning_trainer", "lora", "optimizer_in_backward", "rotor_checkpointable"),
        "timm_images",
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_it_gives(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    said = ast.get_docstring(ast.parse(text)) or ""
    assert f"examples/{path.name}" in said, "how it is started"
    assert re.search(r"Measured: .*\d", said), "what it gave"


_HELPED = """
import contextlib, runpy, sys
for sys.argv in [[path, "--help"] for path in sys.argv[1:]]:
    with contextlib.suppress(SystemExit):
        runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_examples_start_as_a_user_starts_them() -> None:
    """In one process, where nothing of conftest.py has run: each would import torch for itself."""
    names = [name for name, needs in NEEDS.items() if all(map(importlib.util.find_spec, needs))]
    if not names:
        pytest.skip("the libraries are test extras")
    command = [sys.executable, "-c", _HELPED, *(str(EXAMPLES / f"{name}.py") for name in names)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("  --tiny") == len(names)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries that they show
@pytest.mark.parametrize(
    "path", [p for p in FILES if p.stem not in SPREAD], ids=lambda path: path.stem
)
def test_an_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for library in NEEDS.get(path.stem, ()):
        pytest.importorskip(library, reason=f"{library} is a test extra")
    model, losses = runpy.run_path(str(path))["main"](["--tiny"])
    assert len(losses) > 1
    assert all(map(math.isfinite, losses))
    assert len(set(losses)) > 1, "it trains"
    assert "loss" in capsys.readouterr().out
    if path.stem != "rotor_checkpointable":
        # So small a convolution takes, on some CPUs, more than all that could be recomputed.
        assert model.plan.overhead > 0 or path.stem == "timm_images", "something is recomputed"
        assert model.measured_peak_bytes <= model.budget_bytes


def two_processes(name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(EXAMPLES / f"{name}.py"), "--tiny"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("ddp", marks=pytest.mark.nightly), "fsdp2"])
def test_an_example_of_two_processes_runs(name: str) -> None:
    run = two_processes(name)
    if run.returncode and "terminate called without an active exception" in run.stderr:
        run = two_processes(name)  # now and then gloo ends a process that has done all its work
    assert run.returncode == 0, run.stderr[-3000:]
    assert {"ddp": "2 ranks agree", "fsdp2": "rank 1: plain"}[name] in run.stdout
