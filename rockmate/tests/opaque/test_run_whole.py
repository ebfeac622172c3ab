"""Submodules that run whole from some call on: what was planned otherwise serves no more."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rockmate import Rockmate, UnsupportedModuleError


class Scaled(nn.Module):
    """Computes with what nobody sees."""

    scales: dict[str, float] = {}  # noqa: RUF012 (what a recording must not know of)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin() * _read(self.scales)


def _read(scales: dict[str, float]) -> float:
    return scales.get("scale", 1.0)


def net() -> nn.Sequential:
    return nn.Sequential(Scaled(), nn.GELU(), nn.Linear(16, 16), Scaled(), nn.GELU())


def test_later_calls_run_them_whole_and_nothing_else() -> None:
    module, x = net(), torch.randn(32, 16)
    plain = copy.deepcopy(module)
    planned = Rockmate(module, x, "1MiB", cost="flops")
    bytes_before = planned.budget_bytes
    assert planned.plan.opaque == ()
    planned._rockmate.run_whole(["0", "3.linear"], "it reads what nobody sees")
    assert len(planned.plans) == 0
    for _ in range(2):
        assert torch.equal(planned(x), plain(x))
    assert planned.plan.opaque == ("0", "3.linear")
    assert len(planned.plans) == 1
    assert planned.budget_bytes == bytes_before
    planned._rockmate.run_whole(["3"], "it reads what nobody sees")
    assert torch.equal(planned(x), plain(x))
    assert planned.plan.opaque == ("0", "3")
    planned._rockmate.run_whole(["0"], "again")
    assert len(planned.plans) == 1, "a plan that runs it whole already stays"


def test_strict_refuses() -> None:
    planned = Rockmate(net(), torch.randn(32, 16), "1MiB", cost="flops", strict=True)
    with pytest.raises(UnsupportedModuleError, match=r"'0' of Sequential .*what nobody sees"):
        planned._rockmate.run_whole(["0"], "it reads what nobody sees")
