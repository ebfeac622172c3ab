"""What a result of rkgb prints is a line, whatever the network's size."""

from __future__ import annotations

import torch
from torch import nn

import rkgb


def test_a_result_is_named_in_one_line() -> None:
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
    text = repr(rkgb.make_all_graphs(net, torch.ones(2, 4)))
    assert text.startswith("<graphs of Sequential: ")
    assert "\n" not in text
    assert len(text) < 100
