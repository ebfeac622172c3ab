"""Weights that parts which run whole use several times: autograd adds each use, as in plain."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rockmate import Rockmate


class Decides(nn.Module):
    """Runs whole: it decides by a computed value. It uses its weight several times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.inner, self.times = nn.Linear(8, 8), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.inner(x))
        return x * 0.5 if x.mean() > 100 else x


class Around(nn.Module):
    """Calls a part several times, and uses its weight outside of it, too."""

    def __init__(self, calls: int, times: int, *, outside: bool) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(8, 8), Decides(times)
        self.calls, self.outside = calls, outside

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.calls):
            x = self.part(x)
        return self.part.inner(x) if self.outside else x


class Fewer(Decides):
    """Uses its weight less often where the sample is small: as plain, but for one use alone."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times if x.abs().mean() < 2 else 1):
            x = torch.tanh(self.inner(x))
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "root": lambda: Decides(3),
    "once a call": lambda: Around(3, 1, outside=False),
    "often a call": lambda: Around(1, 3, outside=False),
    "outside, too": lambda: Around(2, 2, outside=True),
    "not as often as the sample": lambda: nn.Sequential(nn.Linear(8, 8), Fewer(3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_several_forwards_before_a_backward(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    sample = torch.randn(16, 8)
    planned = Rockmate(model, sample, 2**20)
    batches = [torch.randn(16, 8), torch.randn(16, 8) * 100, torch.randn(16, 8)]
    for _ in range(5):  # later steps add up where autograd keeps the first gradient
        for one in (planned, plain):
            outs = [one(batch) for batch in batches]
            loss = sum(n * out.square().mean() for n, out in enumerate(outs, 1))
            one.zero_grad()
            loss.backward()
        for (own, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), own
