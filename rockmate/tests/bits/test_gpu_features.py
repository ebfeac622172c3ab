"""On a GPU: every way to plan a module trains it with the bits of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rockmate
from oracles.training import assert_same_gradients, assert_trains_like, eager_copy, loss_of
from rockmate import InfeasibleBudgetError, Rockmate
from rockmate.comparison.deterministic import deterministic_algorithms
from rockmate.networks import offload
from rockmate.problems.link import Link
from zoo.nets import hugging_face_gpt2, network_on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    with deterministic_algorithms():
        yield


def planned(model: nn.Module, sample: Any, budget: float = 0.6, **options: Any) -> Rockmate:
    options = {"effort": "fast", **options}
    try:
        return Rockmate(model, sample, budget, **options)
    except InfeasibleBudgetError as error:
        return Rockmate(model, sample, int(1.15 * error.minimum_bytes), **options)


@pytest.mark.parametrize(
    "options",
    [{"offload": "host"}, {"split": "exact"}, {"cost": "flops"}, {"effort": "best"}],
    ids=str,
)
@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_every_option_trains_as_eager_does(
    name: str, options: dict[str, Any], gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Such small tensors take less time than a measured copy needs to begin: none would move.
    monkeypatch.setattr(offload, "_measured", {("host", gpu): Link(1e8, 1e8)})
    model, sample = network_on(gpu, name)
    eager = eager_copy(model)
    module = planned(model, sample, 0.5 if "offload" in options else 0.6, **options)
    assert ("offload" in options) == bool(module.plan.plan.moves)
    assert_trains_like(module, eager, sample)


@pytest.mark.parametrize("options", [{"split": True}, {"compile": True}], ids=str)
def test_other_sums_are_near_eager(options: dict[str, Any], gpu: torch.device) -> None:
    model, sample = network_on(gpu, "gpt")
    eager = eager_copy(model)
    module = planned(model, sample, **options)
    for net in (module, eager):
        with torch.random.fork_rng(devices=[gpu]):
            loss_of(net(*sample)).backward()
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


RECURRENT = {
    "lstm": lambda: nn.LSTM(24, 24, num_layers=2, batch_first=True),
    "lstm with dropout": lambda: nn.LSTM(24, 24, num_layers=2, dropout=0.2, batch_first=True),
    "both ways": lambda: nn.GRU(24, 12, num_layers=2, bidirectional=True, batch_first=True),
    "rnn": lambda: nn.RNN(24, 24, batch_first=True),
}


class Recurrent(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(24, 24), nn.Tanh())
        self.inner = inner
        self.last = nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 24))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x))[0])


@pytest.mark.parametrize("kind", list(RECURRENT))
def test_recurrent_layers_train_as_eager_does(kind: str, gpu: torch.device) -> None:
    torch.manual_seed(0)
    model = Recurrent(RECURRENT[kind]()).to(gpu)
    eager, x = eager_copy(model), torch.randn(16, 12, 24, device=gpu)
    module = planned(model, x, 0.7)
    if "dropout" not in kind:
        assert_trains_like(module, eager, (x,))
        return
    # No generator of torch's knows what cuDNN draws: plain steps beside each other differ, too.
    for _ in range(3):
        module(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_blocks_train_as_eager_does(gpu: torch.device) -> None:
    model = hugging_face_gpt2(layers=4, width=64).to(gpu)
    twin = copy.deepcopy(model)
    ids = torch.randint(90, (4, 32), device=gpu)
    rockmate.apply_to_blocks(model, {"input_ids": ids, "labels": ids}, 0.6)
    for _ in range(3):
        for net in (model, twin):
            with torch.random.fork_rng(devices=[gpu]):
                net(input_ids=ids, labels=ids).loss.backward()
        assert_same_gradients(model, twin)


def test_blocks_of_code_are_planned_at_the_first_step(gpu: torch.device) -> None:
    model, sample = network_on(gpu, "transformer")
    twin = eager_copy(model)
    rockmate.apply(model, budget=0.7)
    for _ in range(2):
        for net in (model, twin):
            with torch.random.fork_rng(devices=[gpu]):
                loss_of(net(*sample)).backward()
        assert_same_gradients(model, twin)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_images_in_mixed_precision_and_channels_last(dtype: torch.dtype, gpu: torch.device) -> None:
    model, (images, *rest) = network_on(gpu, "resnet")
    model.to(memory_format=torch.channels_last)
    sample = (images.contiguous(memory_format=torch.channels_last), *rest)
    twin = eager_copy(model)
    with torch.autocast("cuda", dtype=dtype):
        module = planned(model, sample, 0.7)
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**8) for _ in range(2)]
    for _ in range(2):
        for net, scaler in zip((module, twin), scalers, strict=True):
            with torch.autocast("cuda", dtype=dtype):
                loss = loss_of(net(*sample))
            scaler.scale(loss).backward()
        assert_same_gradients(module, twin)


def test_a_file_of_a_plan_serves_again(gpu: torch.device, tmp_path: Path) -> None:
    model, sample = network_on(gpu, "gpt")
    twin = eager_copy(model)
    first = planned(copy.deepcopy(model), sample)
    first.save_plan(tmp_path / "plan")
    module = Rockmate(model, sample, first.budget_bytes, plan=tmp_path / "plan")
    assert_trains_like(module, twin, sample)


def test_the_largest_batch_fits(gpu: torch.device) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)))
    model.to(gpu)

    def sample(rows: int) -> Tensor:
        return torch.randn(rows, 256, device=gpu)

    found = rockmate.largest_batch(model, sample, "1.5GB", optimizer="sgd", at_most=1 << 16)
    module = Rockmate(model, sample(found.batch), found.budget_bytes, effort="fast")
    assert module.measured_peak_bytes is not None
    assert module.measured_peak_bytes <= found.budget_bytes
