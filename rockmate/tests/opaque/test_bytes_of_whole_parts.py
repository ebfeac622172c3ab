"""What a step keeps to put back, should a part that runs whole come otherwise, takes no memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from oracles.training import measured_peak_bytes
from rockmate import InfeasibleBudgetError, Rockmate


class Chooses(nn.Module):
    """Runs whole: it decides by a computed value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x * 0.5 if x.mean() > 100 else x


class Around(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.chooses = nn.Linear(width, width), Chooses(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.chooses(torch.tanh(self.first(x)))


@pytest.mark.parametrize("kind", [Chooses, Around])
@pytest.mark.parametrize("width", [8, 64])  # a generator's state is larger or smaller than a step
def test_the_random_state_that_may_be_put_back_is_not_above_the_budget(
    kind: type[nn.Module], width: int
) -> None:
    model, x = kind(width), torch.randn(16, width)
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(model, x, 100, planner="none", self_test=False)
    least = error.value.minimum_bytes
    planned = Rockmate(model, x, least, planner="none", self_test=False)
    assert measured_peak_bytes(planned, x, grads_exist=True) <= least
