"""A network whose eager step does not fit is planned and trained all the same.

The limit is imposed by the operating system on a process of its own: an allocation above it fails,
whoever asks for it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("resource", reason="limits of processes are a matter of POSIX")

_SCRIPT = """
import resource, sys
import torch
from torch import nn
from rockmate import Rockmate

torch.set_num_threads(1)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def network(layers, width):
    return nn.Sequential(*(Layer(width) for _ in range(layers)), nn.Linear(width, 1))


def data_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmData:")))


def step(module, x):
    module(x).sum().backward()


layers, rows, width, limit = (int(text) for text in sys.argv[1:])
# A first planning and a first step load what Python and torch load once.
small = network(2, 8)
step(Rockmate(small, torch.randn(4, 8), budget=0.9), torch.randn(4, 8))
model, x = network(layers, width), torch.randn(rows, width)
before = torch.get_rng_state()
resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + limit, resource.RLIM_INFINITY))
try:
    step(model, x)
except RuntimeError as error:
    assert "memory" in str(error), error
    print("eager does not fit")
model.zero_grad()
planned = Rockmate(model, x, budget=int(0.5 * limit), cost="flops")
print("planned", planned.plan.peak_bytes <= int(0.5 * limit), planned.eager_peak_bytes)
step(planned, x)
print("trained", all(p.grad is not None for p in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_eager_needs_four_times_the_limit() -> None:
    layers, rows, width = 96, 8192, 256
    # Every layer keeps its input (of the linear operation) and the result of tanh.
    eager_bytes = 2 * layers * rows * width * 4
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT]
    command += [str(number) for number in (layers, rows, width, eager_bytes // 4)]
    # A fixed threshold makes glibc give freed tensors back at once, so that the limit counts them.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, env=environment
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines() == [
        "eager does not fit",
        "planned True None",
        "trained True",
    ]
