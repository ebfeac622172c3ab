"""What is imported while code is watched finds Python's own builtins."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from rkgb.guards.code_watch import CodeWatch


def test_modules_of_torch_keep_the_builtins_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo has a table of them, which it makes when it is loaded: perhaps in a recording."""
    (tmp_path / "made_here.py").write_text("found = {getattr: 1, hasattr: 2}\n", encoding="utf-8")
    monkeypatch.setattr(torch, "__path__", [*torch.__path__, str(tmp_path)])
    own = getattr, hasattr
    finders = list(sys.meta_path)
    try:
        with CodeWatch(lambda: ""):
            assert own != (getattr, hasattr)
            made = importlib.import_module("torch.made_here")
            assert own != (getattr, hasattr)
    finally:
        sys.modules.pop("torch.made_here", None)
    assert tuple(made.found) == own == (getattr, hasattr)
    assert sys.meta_path == finders


def test_what_runs_once_as_a_module_of_torch_is_loaded_is_no_decision_of_a_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch loads sympy and others, which read `globals()`: a part of the model would run whole."""
    library = "kinds = sorted(globals())\nimport torch.also_made_here\n"
    (tmp_path / "made_here.py").write_text("import library_of_torch\n", encoding="utf-8")
    (tmp_path / "library_of_torch.py").write_text(library, encoding="utf-8")
    (tmp_path / "also_made_here.py").write_text("found = 1\n", encoding="utf-8")
    monkeypatch.setattr(torch, "__path__", [*torch.__path__, str(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path)

    def before() -> None:
        globals()

    def after() -> None:
        globals()

    watch = CodeWatch(lambda: "")
    try:
        with watch:
            before()
            importlib.import_module("torch.made_here")
            after()
    finally:
        for name in ("torch.made_here", "torch.also_made_here", "library_of_torch"):
            sys.modules.pop(name, None)
    seen = {one.code.co_name: one for one in watch.seen.values()}
    assert seen.keys() == {"before", "after"}
    assert all(one.outside for one in seen.values())
