"""Plan and train a network in a process that gets less memory than eager needs.

$ python plan_within_a_limit.py LAYERS ROWS WIDTH LIMIT_BYTES

Run by test_planning_memory.py, which says what must be printed.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from rockmate import Rockmate


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def network(layers: int, width: int) -> nn.Module:
    return nn.Sequential(*(Layer(width) for _ in range(layers)), nn.Linear(width, 1))


def data_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmData:")))


def step(module: nn.Module, x: Tensor) -> None:
    module(x).sum().backward()


def main(layers: int, rows: int, width: int, limit: int) -> None:
    torch.set_num_threads(1)
    # A first planning and a first step load what Python and torch load once.
    small = network(2, 8)
    step(Rockmate(small, torch.randn(4, 8), budget=0.9), torch.randn(4, 8))
    model, x = network(layers, width), torch.randn(rows, width)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + limit, resource.RLIM_INFINITY))
    try:
        step(model, x)
    except RuntimeError as error:
        print("eager does not fit" if "memory" in str(error) else error)
    model.zero_grad()
    planned = Rockmate(model, x, budget=int(0.5 * limit), cost="flops")
    print("planned", planned.plan.peak_bytes <= int(0.5 * limit), planned.eager_peak_bytes)
    step(planned, x)
    print("trained", all(p.grad is not None for p in model.parameters()))


if __name__ == "__main__":
    main(*(int(text) for text in sys.argv[1:]))
