"""A batch without samples: the last one of a filtered data set, or a rank's empty share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients, eager_copy
from runs.planned import wrap


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)[0]
        return made


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.head = nn.Linear(16, 20)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.embedding(x)).flatten(0, 1)
        return nn.functional.cross_entropy(logits, x.flatten(), reduction="sum")


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16))


def _convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(2))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "perceptron": (_perceptron, lambda n: torch.randn(n, 16)),
    "convolutions": (_convolutions, lambda n: torch.randn(n, 3, 12, 12)),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(16, 4, 32, 0.1, batch_first=True),
        lambda n: torch.randn(n, 8, 16),
    ),
    "recurrent": (Recurrent, lambda n: torch.randn(n, 8, 16)),
    "language": (Language, lambda n: torch.randint(0, 20, (n, 8))),
}


@pytest.mark.parametrize("loss", ["sum", "mean"])
@pytest.mark.parametrize("sample_size", [0, 4])
@pytest.mark.parametrize("net", NETS)
def test_an_empty_batch_trains_as_in_plain_pytorch(net: str, sample_size: int, loss: str) -> None:
    torch.manual_seed(0)
    make, batch = NETS[net]
    model = make()
    twin = eager_copy(model)
    wrapped = wrap(model, batch(sample_size), "1MiB")
    for size in (0, 4, 0):
        x = batch(size)
        for module in (wrapped, twin):
            torch.manual_seed(1)
            module.zero_grad()
            made = module(x)
            (getattr(made, loss)() if made.dim() else made).backward()
        if loss == "sum" or size:  # the mean of nothing is no number
            assert_same_gradients(model, twin)
        for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
            assert ours.grad is not None
            assert plain.grad is not None
            assert torch.equal(ours.grad.isnan(), plain.grad.isnan())
