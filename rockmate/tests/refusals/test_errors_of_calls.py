"""A call that plain PyTorch refuses raises plain's error; one that we refuse, ours, in words."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rkgb import DataDependentError
from rockmate import Rockmate, UnsupportedModuleError


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


class CountsTwice(nn.Module):
    """Divides by a buffer that its second call changes, before the backward of its first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.steps.add_(1)
        return self.layer(x) / self.calls / self.steps


class KeepsHistory(nn.Module):
    """A root that decides by values, and never detaches what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.state = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.state = 0.5 * self.state + x.mean()
        y: Tensor = self.second(x * 0.5 if x.mean() > 100 else x) + self.state
        return y.square().mean()


def test_a_backward_that_fails_in_plain_too_is_refused_in_words() -> None:
    counting = CountsTwice()
    with pytest.raises(UnsupportedModuleError, match=r"plain PyTorch, too, .* inplace operation"):
        Rockmate(nn.Sequential(counting, counting), torch.randn(4, 8), "1MiB", cost="flops")
    assert not counting.steps.any()


def test_a_kept_history_fails_where_plain_pytorch_does() -> None:
    model = KeepsHistory()
    twin = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(4, 8), 0.8, cost="flops")
    for module in (planned, twin):
        module(torch.randn(4, 8)).backward()
        loss = module(torch.randn(2, 8))  # a call of another size is planned
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
