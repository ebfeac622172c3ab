"""Outputs that share memory: plain PyTorch knows that one is a view of the other."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rockmate import ChangedTensorError, Rockmate

Pair = tuple[Tensor, Tensor]


class WithPart(nn.Module):
    """Returns a result and its first row, a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Pair:
        y = self.layer(x)
        return y, y[:1]


def losses(which: str, outs: Pair) -> Tensor:
    chosen = {"whole": outs[:1], "part": outs[1:], "both": outs}[which]
    return torch.stack([out.square().mean() for out in chosen]).sum()


@pytest.mark.parametrize("budget", ["1MiB", 1.0])
@pytest.mark.parametrize("changed", [0, 1, None])
@pytest.mark.parametrize("which", ["whole", "part", "both"])
def test_a_change_of_one_is_refused_where_the_other_has_a_gradient(
    which: str, changed: int | None, budget: str | float
) -> None:
    torch.manual_seed(0)
    model, x = WithPart(), torch.randn(4, 8)
    twin = copy.deepcopy(model)
    planned = Rockmate(model, x, budget)

    def step(module: Callable[[Tensor], Pair]) -> None:
        outs = module(x)
        if changed is not None:
            outs[changed].mul_(2.0)
        losses(which, outs).backward()

    own = {"whole": 0, "part": 1}.get(which)
    if changed is not None and own != changed:
        with pytest.raises(ChangedTensorError, match="shares its memory"):
            step(planned)
        return
    step(planned)
    step(twin)
    assert_same_gradients(model, twin)
