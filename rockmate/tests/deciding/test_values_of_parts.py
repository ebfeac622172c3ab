"""Parts that run whole and return other numbers at each call: what follows them runs whole, too."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rkgb.engine import trace_memory
from rockmate import Rockmate

WIDTH = 16


class Router(nn.Module):
    """Says which rows go first, and how many of them there are."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, list[int]]:
        chosen = self.gate(x).argmax(-1)
        return chosen.argsort(), torch.bincount(chosen, minlength=2).tolist()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        order, counts = self.router(x)
        parts = zip(self.experts, x[order].split(counts), strict=True)
        return x + torch.cat([expert(part) for expert, part in parts])


class Layers(nn.Module):
    """Layers in a row, and a loss."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Experts() for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()  # type: ignore[no-any-return]


def train(model: nn.Module, budget: float, steps: int = 6) -> tuple[Rockmate, list[str]]:
    """Train a planned module and a plain one on other rows at each step; return what was told."""
    twin = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(64, WIDTH), budget, cost="flops", cache=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(steps):
            x = torch.randn(64, WIDTH)
            ours, theirs = planned(x), twin(x)
            assert torch.equal(ours, theirs)
            for out in (ours, theirs):
                out.sum().backward()
            assert_same_gradients(model, twin)
    return planned, [str(one.message) for one in told if "runs plain" in str(one.message)]


def test_a_root_is_planned_by_blocks_once_a_part_returns_other_numbers_again() -> None:
    torch.manual_seed(0)
    model = Experts()
    planned, told = train(model, 0.9)
    assert len(told) == 2
    assert "'router' (Router)" in told[0]
    assert told[1].endswith("What runs whole from now on, for this: '(root)'.")
    assert [row.what for row in planned.plans] == ["blocks"]
    x = torch.randn(64, WIDTH)
    peak = trace_memory(lambda span: planned(x).sum().backward(), torch.device("cpu")).peak_bytes
    assert peak - 8 <= planned.budget_bytes  # the loss and its gradient are outside


def test_the_layers_around_equal_parts_run_whole_together() -> None:
    torch.manual_seed(0)
    model = Layers(3)
    planned, told = train(model, 1.0)
    assert len(told) == 2
    assert told[1].endswith("for this: 'layers.0', 'layers.1', 'layers.2'.")
    assert all(f"opaque: 'layers.{k}' (Experts) runs whole" in str(planned.plan) for k in range(3))
