"""A call that plain PyTorch refuses raises plain's error; one that we refuse, ours, in words."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rkgb import DataDependentError
from rockmate import Rockmate


@pytest.mark.parametrize("momentum", [0.1, None])
def test_one_row_is_refused_as_by_plain_and_counted(momentum: float | None) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=momentum), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(4, 8), "1MiB", cost="flops", self_test=False)
    errors = []
    for net in (plain, planned):
        with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
            net(torch.randn(1, 8))
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]
    x = torch.randn(4, 8)
    assert torch.equal(plain(x), planned(x))
    assert all(map(torch.equal, plain.buffers(), model.buffers()))


class LooksAtLongOnes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * 2 if len(x) > 4 and float(y.detach().sum()) > 1e9 else y


def test_what_only_we_refuse_is_told_in_words_at_later_calls_too() -> None:
    model = LooksAtLongOnes()
    planned = Rockmate(model, torch.randn(4, 8), "1MiB", cost="flops", strict=True)
    with pytest.raises(DataDependentError, match=r"test_errors_of_calls.py:\d+ .*module"):
        planned(torch.randn(5, 8))
    planned(torch.randn(4, 8)).sum().backward()
    assert model.layer.weight.grad is not None
