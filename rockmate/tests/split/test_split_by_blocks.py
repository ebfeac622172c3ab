"""`apply_to_blocks(split=)`: options in pieces of rows, chosen together with the others."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rockmate
import rockmate.networks.cutting as cutting
from rockmate import InfeasibleBudgetError
from rockmate.blockwise import recorded
from zoo.heads import WIDTH, Block

QUICK: dict[str, Any] = {"cost": "flops", "compare": False}


@pytest.fixture(autouse=True)
def few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "COUNTS", (4,))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def stack() -> nn.Module:
    torch.manual_seed(0)
    return Stack().double()


def batch(rows: int = 32) -> Tensor:
    return torch.linspace(-1, 1, 2 * rows * WIDTH, dtype=torch.float64).reshape(2, rows, WIDTH)


@cache
def least(split: Any) -> int:
    with pytest.raises(InfeasibleBudgetError) as error:
        rockmate.apply_to_blocks(stack(), batch(), 1, split=split, **QUICK)
    return error.value.minimum_bytes


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    model(x).backward()
    return [p.grad for p in model.parameters()]


def test_blocks_in_pieces_need_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager's values within the bytes, also at another length; a file has what is cut."""
    budget = least(True)
    assert budget < 0.7 * least(False)
    model = stack()
    plan = rockmate.apply_to_blocks(model, batch(), budget, split=True, **QUICK)
    assert {row.pieces for row in plan.rows} == {4}
    assert "in 4 pieces of rows" in str(plan)
    assert plan.measured_peak_bytes <= budget
    ours = gradients(model, batch())
    for found, exact in zip(ours, gradients(stack(), batch()), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-13)
    shorter = gradients(model, batch(16))
    for found, exact in zip(shorter, gradients(stack(), batch(16)), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-13)

    plan.save_plan(tmp_path / "blocks.json")
    monkeypatch.setattr(recorded, "ways_to_run", lambda *_: pytest.fail("it is searched again"))
    again = stack()
    given: dict[str, Any] = {"split": True, "plan": tmp_path / "blocks.json", **QUICK}
    followed = rockmate.apply_to_blocks(again, batch(), budget, **given)
    assert [row.pieces for row in followed.rows] == [row.pieces for row in plan.rows]
    assert all(map(torch.equal, gradients(again, batch()), ours))


def test_no_block_is_cut_that_need_not_be() -> None:
    """Where whole blocks fit, bits are eager's; between the two, some are cut."""
    whole, cut = least(False), least(True)
    model = stack()
    plan = rockmate.apply_to_blocks(model, batch(), 4 * whole, split=True, **QUICK)
    assert {row.pieces for row in plan.rows} == {None}
    assert all(map(torch.equal, gradients(model, batch()), gradients(stack(), batch())))
    rockmate.apply_to_blocks(model, batch(), (whole + cut) // 2, split=True, **QUICK)
    for found, exact in zip(gradients(model, batch()), gradients(stack(), batch()), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-13)
