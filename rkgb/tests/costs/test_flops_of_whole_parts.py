"""The FLOPs of a part that runs whole are those that torch's own counter finds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rkgb.capture.record import record
from rkgb.elements.sample import Sample
from rkgb.elements.target import target_of


class Decides(nn.Module):
    """Runs whole, because it decides by a computed value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.conv, self.cells = nn.Linear(8, 24), nn.Conv1d(16, 16, 3), nn.LSTM(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).chunk(3, -1)
        x = q @ k.mT @ v if x.mean() < 100 else x
        result: Tensor = self.cells(self.conv(x))[0]
        return result


def test_they_are_those_of_torchs_counter() -> None:
    model, x = Decides(), torch.randn(4, 16, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    around = nn.Sequential(nn.Linear(8, 8), model)
    basic = record(
        around, Sample.of(around, torch.randn(4, 16, 8), None), opaque=("1",), guards=False
    )
    found = [
        target_of(op).flops(lambda _: 0)
        for op in (*basic.ops, *basic.backward)
        if target_of(op).runs_python
    ]
    assert len(found) == 2
    forward, backward = found
    assert forward == counter.get_total_flops() // 3  # a backward takes twice as many
    assert forward + backward == counter.get_total_flops()
