"""Results that a planned step would return otherwise are refused by name."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from rkgb import SideEffectError
from rockmate import Rockmate


class Returning(nn.Module):
    """It writes on its result, or returns a leaf that it has made."""

    def __init__(self, what: str, *, is_whole: bool) -> None:
        super().__init__()
        self.layer, self.what, self.is_whole = nn.Linear(8, 8), what, is_whole

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = torch.tanh(self.layer(x * (1 + random.random()) if self.is_whole else x))
        if self.what == "number":
            y.scale = 2.0
        elif self.what == "tensor":
            y.auxiliary = y.sum()
        elif self.what == "made":
            made = torch.ones(8, requires_grad=True)
            return y * made, made
        else:
            return y, y.detach().requires_grad_()
        return y


@pytest.mark.parametrize("is_whole", [False, True], ids=["recorded", "whole"])
@pytest.mark.parametrize("what", ["number", "tensor", "made", "cut off"])
def test_what_a_step_would_return_otherwise_is_refused(what: str, is_whole: bool) -> None:
    advice = "outside of forward" if what in ("made", "cut off") else "beside the tensor"
    with pytest.raises(SideEffectError, match="draw with torch" if is_whole else advice):
        Rockmate(Returning(what, is_whole=is_whole), (torch.randn(6, 8),), 1_000_000)


def test_what_the_module_has_already_may_be_returned() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.layer.weight.tag = "known before"

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.layer(x), self.layer.weight, x

    model, x = Own(), torch.randn(6, 8)
    x.tag = "known, too"
    _, weight, given = Rockmate(model, (x,), 1_000_000)(x)
    assert weight is model.layer.weight
    assert given is x
