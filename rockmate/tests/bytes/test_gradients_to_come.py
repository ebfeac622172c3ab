"""Gradients that come while the backward runs: what autograd copies, keeps and shares of them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

import rockmate
from oracles.training import assert_same_gradients
from rkgb.engine import trace_memory

WIDTH = 128
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def spectral(x: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Multiply modes by complex weights: einsum hands their gradients over in other strides."""
    weight = torch.complex(p, q).unflatten(0, (8, -1))[..., :16]
    modes = torch.fft.rfft(x.unflatten(1, (16, 8)), n=30)
    return torch.fft.irfft(torch.einsum("bim,oim->bom", modes, weight), n=16).flatten(1)


def in_autocast(x: Tensor, p: Tensor, q: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return ((x @ p).tanh() @ q).float()


LAYERS: dict[str, Layer] = {
    "other strides": lambda x, p, q: torch.einsum("bi,io->ob", x, p).t().tanh() * q,
    "another type": in_autocast,
    "views of one": lambda x, p, q: x @ torch.cat([p, q])[::2].t(),
    "one for two": lambda x, p, q: (x + p + q).tanh(),
    "expanded": lambda x, p, q: (x + p.sum()) * (q.sum() / WIDTH).tanh(),
    "tied": lambda x, p, q: ((x @ p).tanh() + q).sigmoid() @ p.t(),
    "complex": spectral,
}
COPIED = {"other strides": 4 * (WIDTH**2 + 60**2), "another type": 4 * WIDTH**2}
ALWAYS = ("other strides", "views of one", "one for two", "complex")
CELLS = [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.nightly) for n in LAYERS]


class Net(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        parts = [nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(6)]
        self.parts = nn.ParameterList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for p, q in zip(self.parts[::2], self.parts[1::2], strict=True):
            x = self.layer(F.gelu(x), p, q)
        return x.square().mean()


@pytest.mark.parametrize("name", CELLS)
def test_what_is_there_when_gradients_come_is_what_was_planned(name: str) -> None:
    torch.manual_seed(0)
    model, x = Net(LAYERS[name]), torch.randn(WIDTH, WIDTH)
    twin = copy.deepcopy(model)
    with pytest.raises(rockmate.InfeasibleBudgetError) as refused:
        rockmate.Rockmate(model, x, memory=1000, optimizer="sgd", cost="flops")
    memory = refused.value.minimum_bytes
    rk = rockmate.Rockmate(model, x, memory=memory, optimizer="sgd", cost="flops")
    assert "then, gradients" in str(rk.memory), "activations use their room"
    rk(x).backward()  # the first step looks at what Python reads, which takes some kB
    rk.zero_grad()
    peak = trace_memory(lambda _: rk(x).backward(), torch.device("cpu")).peak_bytes
    copy_bytes = COPIED.get(name, 0)  # on top, though what a node has read is gone by then
    assert 0.98 * (rk.plan.peak_bytes - copy_bytes) <= peak <= rk.plan.peak_bytes
    twin(x).backward()
    assert_same_gradients(model, twin)
