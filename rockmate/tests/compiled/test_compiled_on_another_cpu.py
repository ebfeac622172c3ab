"""Inductor's cache of code, found by a CPU with other vectors: a disk may move between machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_STEP = """
import torch
from torch import nn
from rockmate import Rockmate

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(40, 40), nn.GELU(), nn.LayerNorm(40), nn.Tanh())
rk = Rockmate(model, torch.randn(32, 40), "1MiB", compile=True, cache=False)
assert rk.plan.compiled is not None
"""


@pytest.mark.nightly
def test_code_for_wider_vectors_is_not_taken(tmp_path: Path) -> None:
    """Compiled for narrower ones, its loops would leave out elements; the self-test sees it."""
    for capability in ({}, {"ATEN_CPU_CAPABILITY": "avx2"}):
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), **capability}
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _STEP], env=env, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr[-2000:]
