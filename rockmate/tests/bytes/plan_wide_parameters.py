"""Plan a network of large parameters and small activations in little memory beside them.

$ python plan_wide_parameters.py LAYERS ROWS WIDTH BUDGET_BYTES

Run by test_planning_memory.py, which says what must be printed. The limit is what is resident, the
budget, and a twentieth of the parameters' bytes.
"""

from __future__ import annotations

import gc
import resource
import sys

import torch
from plan_within_a_limit import data_bytes
from torch import nn

from rockmate import Rockmate


def network(layers: int, width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
    )


def step(module: nn.Module, x: torch.Tensor) -> None:
    module(x).square().mean().backward()


def main(layers: int, rows: int, width: int, budget: int) -> None:
    torch.set_num_threads(1)
    # What planning loads, and the room that its own objects need, are there afterwards.
    small = network(layers, 8)
    for count in (rows, rows // 2):
        step(Rockmate(small, torch.randn(count, 8), budget, cost="flops"), torch.randn(count, 8))
    step(network(2, width), torch.randn(rows, width))  # libraries take what they keep
    model, x = network(layers, width), torch.randn(rows, width)
    parameters = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    gc.collect()

    def limit(resident: int) -> None:
        most = resident + budget + parameters // 20
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))

    limit(data_bytes())
    module = Rockmate(model, x, budget, cost="flops")
    print("planned", module.plan.peak_bytes <= budget, module.eager_peak_bytes is not None)
    print("gradients", sum(p.grad is not None for p in model.parameters()))
    # A step makes the gradients, and the optimizer its states: resident from then on.
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    step(module, x)
    optimizer.step()
    limit(data_bytes())
    step(module, x[: rows // 2])  # another kind of input, planned for here
    optimizer.step()
    print("planned in the middle of training", len(module.plans))


if __name__ == "__main__":
    main(*(int(text) for text in sys.argv[1:]))
