"""What build machines run on each wheel of the core works on this one."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import rotor


def test_the_core_solves_a_chain_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert rotor.__file__ is not None
    runpy.run_path(str(Path(__file__).with_name("core_alone.py")), run_name="__main__")
    assert "12.0 ms with room" in capsys.readouterr().out
