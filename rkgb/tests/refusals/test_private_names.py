"""Private names of torch: each one is listed, there, and called where it is replaced."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

from rkgb import TraceError
from rkgb.recording.watch import _surroundings, transparent_checkpoints
from rkgb.torch_api import private_names
from rkgb.torch_api.private_names import called_of, refuse_missing

ROOT = Path(__file__).resolve().parents[3]
LISTED = {
    *(*private_names.TO_RUN_STEPS, *private_names.ON_CUDA, *private_names.WITHOUT_CONTENT),
    *(*private_names.TO_COMPILE, *private_names.AMONG_PROCESSES),
    *private_names.IN_PLACE_OF_SLOWER,
}


def _is_private(name: str) -> bool:
    inside = name.startswith("torch.ops.")
    return not inside and any(p[0] == "_" != p[1:2] for p in name.split("."))


def _dotted(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [*_dotted(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else ["?"]


def _read_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names of torch that a module imports or reads as attributes."""
    known: dict[str, str] = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for name in node.names:
                known[name.asname or name.name] = f"{node.module}.{name.name}"
                yield f"{node.module}.{name.name}"
        elif isinstance(node, ast.Import):
            known |= {n.asname: n.name for n in node.names if n.asname and "torch." in n.name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *rest = _dotted(node)
            if first in known:
                yield ".".join([known[first], *rest])


def test_every_private_name_is_listed() -> None:
    found = {
        name
        for package in ("rkgb", "rockmate")
        for file in (ROOT / package / "src").rglob("*.py")
        for name in _read_in(ast.parse(file.read_text(encoding="utf-8")))
        if _is_private(name)
    }
    # Of a chain the last is listed, and what a listed name has is its own matter.
    chains = {name for name in found if not any(o.startswith(f"{name}.") for o in found)}
    missing = {n for n in chains if not any(n == k or n.startswith(f"{k}.") for k in LISTED)}
    assert not missing
    assert {k for k in LISTED if not any(n == k or n.startswith(f"{k}.") for n in found)} == set()


@pytest.mark.parametrize("group", ["WITHOUT_CONTENT", "AMONG_PROCESSES", "IN_PLACE_OF_SLOWER"])
def test_they_are_there(group: str) -> None:
    refuse_missing(getattr(private_names, group), "for a test")


@pytest.mark.slow
def test_what_compiling_needs_is_there() -> None:
    refuse_missing(private_names.TO_COMPILE, "for a test")


def test_what_cuda_needs_is_there() -> None:
    if not torch.backends.cuda.is_built():
        pytest.skip("this torch is built without CUDA")
    refuse_missing(private_names.ON_CUDA, "on CUDA")


@pytest.mark.parametrize("name", ["torch._C._no_such", "torch._no.such", "torch.cuda._no_such"])
def test_a_missing_name_is_refused_with_the_version(name: str) -> None:
    with pytest.raises(TraceError) as caught:
        refuse_missing((name,), "for a test")
    start = f"torch {torch.__version__} has no {name}, which rkgb needs for a test"
    assert str(caught.value).startswith(start)


def test_what_torch_no_longer_calls_is_refused_by_name() -> None:
    called = SimpleNamespace(__name__="module", old=lambda: 1, new=lambda: 2)
    assert called_of(called, ["new", "old"], lambda: called.old(), "for a test") == "old"
    assert called_of(called, ["new", "old"], lambda: called.new(), "for a test") == "new"
    with pytest.raises(TraceError, match=r"does not use .*old, which rkgb needs for a test"):
        called_of(called, ["new", "old"], lambda: None, "for a test")
    assert called.old() == 1


def test_what_is_replaced_around_checkpoints_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    with transparent_checkpoints():
        pass
    watch = sys.modules["rkgb.recording.watch"]
    watch._surroundings_of_checkpoints.cache_clear()  # type: ignore[attr-defined]
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch.utils.checkpoint, "checkpoint", lambda *_, **__: None)
            refused = pytest.raises(TraceError, match=r"does not use .*CheckpointFunction")
            with refused, transparent_checkpoints():
                pass
    finally:
        watch._surroundings_of_checkpoints.cache_clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "call",
    [
        lambda surroundings: surroundings(abs, False, None, "default", False, True, 1),
        lambda surroundings: surroundings(abs, (1,), {}, preserve_rng_state=False, debug=False),
    ],
    ids=["torch 2.13", "torch 2.14"],
)
def test_checkpoints_say_by_place_or_by_name_that_no_random_state_is_kept(call: Any) -> None:
    kept: list[bool] = []

    @contextlib.contextmanager
    def around(keeps: bool) -> Iterator[None]:
        kept.append(keeps)
        yield

    for _ in call(partial(_surroundings, around)):
        assert kept == [False]
    assert kept


@pytest.mark.parametrize("package", ["rkgb", "rotor", "rockmate"])
def test_the_versions_that_were_tried_are_in_the_metadata(package: str) -> None:
    readme = (ROOT / package / "README.md").read_text(encoding="utf-8")  # a wheel's description
    said = " ".join(readme.split())
    versions = ", ".join(private_names.TRIED[:-1]) + f" and {private_names.TRIED[-1]}"
    assert f"Tried with torch {versions}" in said


def test_every_tensor_that_is_made_names_its_device() -> None:
    factories = {f.__name__ for f in _device_constructors()}
    for package in ("rkgb", "rotor", "rockmate"):
        for file in (ROOT / package / "src").rglob("*.py"):
            for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(call, ast.Call) and _dotted(call.func)[:1] == ["torch"]:
                    named = {keyword.arg for keyword in call.keywords}
                    made = _dotted(call.func)[-1]
                    # Otherwise it lies where torch.set_default_device says.
                    assert made not in factories or named & {"device", None}, (file, call.lineno)
