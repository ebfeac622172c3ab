"""A call under a new key, after gradients that came as they usually do not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rockmate import Rockmate


class WithItsFirstRows(nn.Module):
    """Returns a view beside what it is a view of: two nodes, or one where only one is read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.layer(x) + x
        return y, y[:1], torch.tanh(y).t()


def freeze_a_bias(model: nn.Module) -> None:
    model.get_parameter("layer.bias").requires_grad_(False)


def eval_a_part(model: nn.Module) -> None:
    model.get_submodule("drop").eval()


@pytest.mark.parametrize("change", [eval_a_part, freeze_a_bias])
@pytest.mark.parametrize("read", [(0,), (1,), (2,), (0, 2)])
def test_other_outputs_are_read_under_a_new_key(
    read: tuple[int, ...], change: Callable[[nn.Module], None]
) -> None:
    torch.manual_seed(0)
    model = WithItsFirstRows()
    plain = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(4, 8), "1MiB", cost="flops", self_test=False)
    for places in (read, (0, 1, 2), read):
        x = torch.randn(4, 8)
        for net in (plain, planned):
            net.zero_grad()
            outs = net(x)
            torch.stack([outs[place].square().mean() for place in places]).sum().backward()
        assert_same_gradients(plain, model)
        if places == read:
            for net in (plain, planned):
                change(net)
