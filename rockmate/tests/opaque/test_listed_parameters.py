"""Parameters that a part which runs whole reads from a list, a dict or a tuple of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_trains_like, eager_copy
from runs.planned import wrap


class Listed(nn.Module):
    """Reads a number, so that it runs whole."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        first, second = (nn.Parameter(torch.randn(24, 24) / 5) for _ in range(2))
        self.first, self.second, self.kind = first, second, kind
        self.weights: Any = {
            "list": [first, second],
            "tuple": (first, second),
            "dict": {"first": first, "second": second},
            "twice": [first, second, first],
        }[kind]

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 1e9:
            x = x * 2
        for weight in self.weights.values() if self.kind == "dict" else self.weights:
            x = torch.tanh(x @ weight)
        return x


class Recurrent(nn.Module):
    """Torch keeps the weights in a list beside, and may lay them into one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(24, 24, num_layers=2, batch_first=True)
        weights = list(self.inner.parameters())
        flat = torch.cat([weight.detach().flatten() for weight in weights])
        for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
            weight.data = part.view_as(weight)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 1e9:
            x = x * 2
        out: Tensor = self.inner(x)[0]
        return out


@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "twice", "recurrent"])
def test_what_attributes_list_gets_gradients_as_in_plain_pytorch(kind: str) -> None:
    torch.manual_seed(0)
    inner = Recurrent() if kind == "recurrent" else Listed(kind)
    last = nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 24))
    model = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), inner, last)
    listed = vars(inner).get("weights")
    eager, x = eager_copy(model), torch.randn(8, 12, 24)
    assert_trains_like(wrap(model, x, 0.99), eager, (x,))
    assert vars(inner).get("weights") is listed or kind == "tuple"
    if kind == "tuple":
        assert all(a is b for a, b in zip(inner.weights, listed, strict=True))
