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
