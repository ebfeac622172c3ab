"""Planning leaves no gradient on weights that belong to no module of the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rkgb import RkgbError
from rockmate import Rockmate, RockmateError, apply_to_blocks

OUTSIDE = torch.full((1,), 0.5, requires_grad=True)


class Net(nn.Module):
    """Reads a trainable tensor in a global variable, between its blocks."""

    def __init__(self, *, decides: bool) -> None:
        super().__init__()
        self.first, self.last, self.decides = nn.Linear(8, 8), nn.Linear(8, 8), decides

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * OUTSIDE
        if self.decides and x.mean() > 100:
            x = x * 2
        out: Tensor = self.last(x)
        return out


@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("before", [None, 3.0])
def test_refusing_leaves_no_gradient_outside(decides: bool, before: float | None) -> None:
    OUTSIDE.grad = gradient = None if before is None else torch.full((1,), before)
    with pytest.raises((RkgbError, RockmateError)):
        Rockmate(Net(decides=decides), torch.randn(64, 8), 10**6)
    assert OUTSIDE.grad is gradient
    assert before is None or OUTSIDE.grad == before


@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("before", [None, 3.0])
def test_planning_by_blocks_leaves_no_gradient_outside(decides: bool, before: float | None) -> None:
    model, x = Net(decides=decides), torch.randn(64, 8)
    plain = copy.deepcopy(model)
    OUTSIDE.grad = gradient = None if before is None else torch.full((1,), before)
    apply_to_blocks(model, x, 10**6, blocks=["Linear"])
    assert OUTSIDE.grad is gradient
    assert before is None or OUTSIDE.grad == before
    found = []
    for net in (model, plain):
        OUTSIDE.grad = None
        net(x).square().mean().backward()
        found.append(OUTSIDE.grad)
    assert torch.equal(*found)
