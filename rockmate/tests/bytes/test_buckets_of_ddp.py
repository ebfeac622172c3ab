"""`memory=` counts what DistributedDataParallel copies gradients to."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import rockmate
from rkgb.engine import trace_memory

HOST = torch.device("cpu")


@pytest.fixture
def _two_processes() -> Iterator[None]:
    """Let this be the first of two processes, whose collectives change nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def alone(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket as one of one: the fake collective has no result."""
    found: torch.futures.Future[Tensor] = torch.futures.Future()
    found.set_result(bucket.buffer())
    return found


@pytest.mark.usefixtures("_two_processes")
@pytest.mark.parametrize("as_views", [False, True])
def test_whole_steps_of_ddp_stay_within_their_memory(as_views: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)]
    model, x = nn.Sequential(*layers), torch.randn(256, 64)
    stepper = torch.optim.AdamW(model.parameters())
    how: dict[str, Any] = {"optimizer": stepper, "cost": "flops", "share": False}
    how["loss"] = lambda y: y.square().mean()
    with pytest.raises(rockmate.InfeasibleBudgetError) as refused:
        rockmate.Rockmate(model, x, memory=1000, **how)
    memory = refused.value.minimum_bytes
    rk = rockmate.Rockmate(model, x, memory=memory, **how)
    gradients = sum(p.nbytes for p in model.parameters())
    parts = {part.name: part.size_bytes for part in rk.memory.parts}
    assert parts["buckets of DistributedDataParallel"] == parts["gradients"] == gradients
    before = sum(t.nbytes for t in (*model.parameters(), x))
    made: list[nn.Module] = []

    def training(_span: Any) -> None:
        made.append(DistributedDataParallel(rk, gradient_as_bucket_view=as_views))
        made[0].register_comm_hook(None, alone)
        for _ in range(3):
            made[0](x)[0].backward()
            stepper.step()
            stepper.zero_grad()

    peak = before + trace_memory(training, HOST).peak_bytes
    assert peak <= memory
    state = (v for s in stepper.state.values() for v in s.values() if isinstance(v, Tensor))
    assert as_views or peak > before + sum(v.nbytes for v in state) + gradients
