"""What changes between a forward and its backward is as if it had not, or is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rockmate import Rockmate
from rockmate.errors import ChangedTensorError, UnsupportedModuleError


class Viewed(nn.Module):
    """Saves a value, and returns a view of it."""

    def __init__(self, act: Callable[[Tensor], Tensor], view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.act, self.view = nn.Linear(8, 8), act, view

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.act(self.inner(x))
        return self.view(made), made.sum()


@pytest.mark.parametrize("act", [torch.relu, torch.tanh])
@pytest.mark.parametrize("view", [torch.t, torch.ravel, torch.detach])
def test_an_output_that_shares_memory_with_a_saved_value_must_not_change(
    act: Callable[[Tensor], Tensor], view: Callable[[Tensor], Tensor]
) -> None:
    model, x = Viewed(act, view), torch.randn(4, 8)
    planned = Rockmate(copy.deepcopy(model), x, 1.0)
    for net, error in ((model, RuntimeError), (planned, ChangedTensorError)):
        seen, loss = net(x)
        with torch.no_grad():
            seen.mul_(2)
        with pytest.raises(error, match=r"in ?place"):
            loss.backward()
    _, loss = planned(x)  # and the next step is as ever
    loss.backward()
    model(x)[1].backward()
    assert torch.equal(planned.inner.weight.grad, model.inner.weight.grad)


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


def _backward_in_another_order(made: Tensor) -> None:
    made.backward(torch.ones_like(made).contiguous(memory_format=torch.channels_last))


@pytest.mark.parametrize("frozen", ["0.weight", "1.bias", "3.weight"])
def test_a_weight_is_frozen_before_a_backward_of_a_new_kind(frozen: str) -> None:
    model = _layers()
    twin = copy.deepcopy(model)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    planned, found = Rockmate(twin, x, 1.0), []
    for net in (model, planned):
        x.grad = None
        made = net(x)
        net.get_parameter(frozen).requires_grad_(False)
        _backward_in_another_order(made)
        assert not net.get_parameter(frozen).requires_grad
        found.append([*(p.grad for p in net.parameters()), x.grad])
    for ours, theirs in zip(*found, strict=True):
        assert ours is theirs or torch.equal(ours, theirs)


def test_a_backward_of_a_new_kind_is_refused_once_its_module_computes_otherwise() -> None:
    model, x = _layers(), torch.randn(2, 3, 8, 8)
    planned = Rockmate(model, x, 1.0)
    made = planned(x)
    model[1].eval()
    with pytest.raises(UnsupportedModuleError, match=r"changed since its forward: module '1'"):
        _backward_in_another_order(made)
