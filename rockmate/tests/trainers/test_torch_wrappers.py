"""torch's wrappers around a model, or around its layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import rockmate
from rockmate import Rockmate, UnsupportedModuleError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(torch.tanh(self.norm(self.up(x)))))


def layers(count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(count)])


def assert_same_steps(ours: nn.Module, plain: nn.Module, x: Tensor) -> None:
    for seed in range(2):
        for model in (ours, plain):
            model.zero_grad()
            torch.manual_seed(seed)
            model(x).square().sum().backward()
        for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert torch.equal(a.grad, b.grad), name


def test_blocks_in_checkpoint_wrappers() -> None:
    """Its `named_parameters` leaves out a part of the paths; what it recomputes is the plan's."""
    model, x = layers(2), torch.randn(64, 16)
    for name, layer in model.named_children():
        setattr(model, name, checkpoint_wrapper(layer))
    plain = copy.deepcopy(model)
    plan = rockmate.apply_to_blocks(model, x, 0.9, cost="flops", compare=False)
    assert len(plan.rows) == 2
    assert_same_steps(model, plain, x)


class Stage(nn.Module):
    """A stage of a pipeline that has got one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_stage_with_one_layer() -> None:
    torch.manual_seed(0)
    model, x = Stage(), torch.randn(64, 16)
    plain = copy.deepcopy(model)
    plan = rockmate.apply_to_blocks(model, x, 0.95, cost="flops", compare=False)
    assert [row.path for row in plan.rows] == ["layers.0"]
    assert_same_steps(model, plain, x)


@pytest.fixture
def alone() -> Iterator[None]:
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def data_parallel(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fully_sharded(model: nn.Module) -> nn.Module:
    fsdp = distributed.fsdp
    kind = fsdp.FullyShardedDataParallel
    cpu, whole = torch.device("cpu"), fsdp.ShardingStrategy.NO_SHARD
    return kind(model, device_id=cpu, sharding_strategy=whole)


@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.parametrize(
    "call", [Rockmate, rockmate.apply, rockmate.apply_to_blocks, rockmate.estimate]
)
@pytest.mark.parametrize(
    ("around", "advice"),
    [(data_parallel, r"rockmate\.apply\(ddp\.module"), (fully_sharded, "FSDP2")],
)
@pytest.mark.usefixtures("alone")
def test_engines_around_the_model_are_refused(
    around: Callable[[nn.Module], nn.Module], advice: str, call: Callable[..., Any]
) -> None:
    """Planning runs steps of its own, of which the other processes must hear nothing."""
    model, x = around(layers(2)), torch.randn(4, 16)
    given = (model, x) if call is rockmate.estimate else (model, x, 0.9)
    with pytest.raises(UnsupportedModuleError, match=advice) as caught:
        call(*given)
    assert f"'(root)' is a {type(model).__name__}" in str(caught.value)
