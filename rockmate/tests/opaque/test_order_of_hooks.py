"""Hooks after gradients of a part that runs whole: in plain PyTorch's order, also within one node.

One node of an LSTM gives the gradients of four weights. The engine takes these by its heap.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rockmate import Rockmate


class Net(nn.Module):
    def __init__(self, layers: int, *, both_ways: bool, is_first: bool) -> None:
        super().__init__()
        self.first = nn.Identity() if is_first else nn.Linear(8, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=layers, bidirectional=both_ways)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lstm(self.first(x))[0])


def order_of(model: nn.Module, called: nn.Module, x: Tensor) -> list[str]:
    found: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, n=name: found.append(n))
    called(x).square().mean().backward()
    return found


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("layers", "both_ways"), [(1, False), (3, False), (2, True)])
def test_weights_of_one_node_are_called_by_the_engines_heap(
    layers: int, both_ways: bool, is_first: bool
) -> None:
    x = torch.randn(20, 5, 8)
    ours, theirs = (Net(layers, both_ways=both_ways, is_first=is_first) for _ in range(2))
    planned = Rockmate(ours, x, 10**7, opaque=["lstm"], cost="flops", self_test=False)
    assert order_of(ours, planned, x) == order_of(theirs, theirs, x)
