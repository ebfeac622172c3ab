"""Checkpoints that draw other random numbers in their second run than in the first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rockmate
from rkgb.errors import DrawsAgainError


class Inner(nn.Module):
    def __init__(self, *, keeps: bool, reentrant: bool, branches: bool) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
        self.keeps, self.reentrant, self.branches = keeps, reentrant, branches

    def part(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.branches and x.sum() > 1e6:  # so that it runs whole
            x = 2 * x
        found: Tensor = checkpoint(
            self.part, x, use_reentrant=self.reentrant, preserve_rng_state=self.keeps
        )
        return found


def _model(**choices: bool) -> nn.Module:
    torch.manual_seed(0)
    # The first dropout has the same size: its kernel is not run again for the second.
    before = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5))
    return nn.Sequential(before, Inner(**choices), nn.Linear(8, 8))


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_does_not_keep_the_random_state(reentrant: bool, branches: bool) -> None:
    model, sample = _model(keeps=False, reentrant=reentrant, branches=branches), torch.randn(6, 8)
    with pytest.raises(DrawsAgainError, match="leave preserve_rng_state at True") as refused:
        rockmate.Rockmate(model, (sample,), 20_000, cost="flops", cache=False, progress=False)
    assert "module '1" in str(refused.value)
    if not branches:
        assert "test_checkpoints_that_draw.py" in str(refused.value)


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_one_that_draws_nothing_is_planned(reentrant: bool, branches: bool) -> None:
    model, sample = _model(keeps=False, reentrant=reentrant, branches=branches), torch.randn(6, 8)
    model[1].eval()  # type: ignore[index,union-attr]
    planned = rockmate.Rockmate(model, (sample,), 20_000, cost="flops", cache=False, progress=False)
    found = []
    for module in (planned, model):
        model.zero_grad()
        torch.manual_seed(1)
        result = module(sample)
        result.square().sum().backward()
        found.append([result.detach(), *(p.grad.clone() for p in model.parameters())])
    assert all(map(torch.equal, *found))
