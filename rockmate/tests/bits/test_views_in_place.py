"""Tensors that become views of themselves: who reads them gets the sizes that they have by then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients, eager_copy
from rockmate import Rockmate
from runs.planned import computing_again

TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose_": lambda x: x.transpose_(0, 1),
    "t_": lambda x: x.t_(),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(),
    "squeeze_ of one": lambda x: x.unsqueeze_(1).squeeze_(1),
    "as_strided_": lambda x: x.as_strided_((8, 4), (1, 8)),
}


class Turns(nn.Module):
    def __init__(self, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.turn = nn.Linear(8, 8), turn

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * 2
        before, part = x + 1, x[:, :2] * 3
        self.turn(x)
        y = torch.addmm(before, x.reshape(4, 8).exp().tanh(), self.first.weight)
        return (y * x.sum(-1).mean()).softmax(-1) * x.square().sum() + part.mean()


class Cells(nn.Module):
    """A GRU turns its result in place, and the kernel of an LSTM reads that."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.lstm(self.gru(x)[0])[0]
        return made


@pytest.mark.parametrize("name", [*TURNS, "cells"])
@pytest.mark.parametrize("planner", ["none", "recompute_all"])
def test_a_tensor_that_becomes_a_view_of_itself(name: str, planner: str) -> None:
    torch.manual_seed(0)
    is_cells = name == "cells"
    model = Cells() if is_cells else Turns(TURNS[name])
    shape = (4, 5, 8) if is_cells else (4, 8)
    twin = eager_copy(model)
    with computing_again(planner):
        planned = Rockmate(model, torch.randn(shape), 2**20, planner=planner, self_test=False)
    assert planned.plan.opaque == ()
    assert ("again:" in planned.plan.source()) is (planner == "recompute_all")
    for _ in range(3):
        x = torch.randn(shape)
        ours, theirs = planned(x), twin(x)
        assert torch.equal(ours, theirs)
        ours.square().mean().backward()
        theirs.square().mean().backward()
    assert_same_gradients(model, twin)
