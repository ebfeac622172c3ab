"""What a module keeps with a history holds no tensor of a step that is over."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor, nn

from rockmate import InfeasibleBudgetError, apply_to_blocks


class Block(nn.Module):
    """It is computed again from its argument, whose content is compared for that."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + x.norm(dim=-1, keepdim=True)) + x.std(-1, keepdim=True)


class Averaging(nn.Module):
    """Keeps a mean of what its block returns, with its history."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 8), Block(), nn.Linear(8, 8)
        self.state, self.given = torch.zeros(()), lambda: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.given = weakref.ref(x)
        x = self.block(x)
        self.state = 0.5 * self.state.detach() + x.mean()
        return self.last(x + self.state)


def test_what_a_block_was_given_is_freed_when_its_backward_is_over() -> None:
    model, sample, budget = Averaging(), torch.randn(4, 8), 1
    try:
        apply_to_blocks(model, sample, budget, blocks=["Block"], compare=False)
    except InfeasibleBudgetError as error:
        apply_to_blocks(model, sample, error.minimum_bytes, blocks=["Block"], compare=False)
    for _ in range(3):
        model(torch.randn(4, 8)).backward(torch.randn(4, 8))
        gc.collect()
        assert model.state.grad_fn is not None
        assert model.given() is None
