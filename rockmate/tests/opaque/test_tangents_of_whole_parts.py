"""Gradients come to a whole part in any layout, and go on as its own backward makes them.

How they lie decides the order in which later kernels sum them, and so the last bits.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rockmate import Rockmate


class Deciding(nn.Module):
    """Reads a value, so it runs whole; its backward keeps the layout of the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + abs(x.detach().mean().item()))


class Scaled(nn.Module):
    """One weight is used twice before each whole part: its gradients are sums over everything."""

    def __init__(self, *, turns: bool, parts: int) -> None:
        super().__init__()
        self.turns = turns
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(parts))
        self.parts = nn.ModuleList(Deciding() for _ in range(parts))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for scale, part in zip(self.scales, self.parts, strict=True):
            x = part(x * scale + scale)
        return self.last(x.permute(0, 2, 3, 1)) if self.turns else x


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("turns", [False, True])
def test_layouts_of_gradients(parts: int, *, turns: bool) -> None:
    torch.manual_seed(0)
    model = Scaled(turns=turns, parts=parts)
    plain = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(4, 8, 4, 4), 2**20)
    contiguous = torch.contiguous_format
    for form in (contiguous, torch.channels_last, torch.channels_last, contiguous):
        x = torch.randn(4, 8, 4, 4)
        ours, theirs = planned(x), plain(x)
        assert torch.equal(ours, theirs)
        gradient = torch.randn_like(ours).contiguous(memory_format=form)
        ours.backward(gradient)
        theirs.backward(gradient)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
    for each in (planned, plain):  # the gradient of a sum is one number, seen everywhere
        each(x).sum().backward()
    assert_same_gradients(model, plain)


class Pairwise(nn.Module):
    """Runs whole, and its backward takes more for a gradient that lies otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(x)
        if x.mean() > 100:
            x = x * 0.5
        pairs = torch.einsum("...i,...j->...ij", x, x).softmax(-1)
        first, second = pairs.mean(-2).unbind(1)[:2]  # two outputs of one node
        return pairs.mean(-2), first + second


@pytest.mark.parametrize(
    ("gradient", "is_usual"),
    [
        (torch.randn(64, 8), True),
        (torch.ones(()).expand(64, 8), True),  # of a sum
        (torch.randn(8, 64).t(), False),
    ],
)
def test_a_root_that_runs_whole_tells_of_other_layouts(gradient: Tensor, is_usual: bool) -> None:
    model, x = Pairwise(), torch.randn(64, 8)
    plain = copy.deepcopy(model)
    planned = Rockmate(model, x, 2**20)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            planned(x)[0].backward(gradient)
        said = [str(one.message) for one in told if "another layout" in str(one.message)]
        assert len(said) == (0 if is_usual else 1)
        assert is_usual or "strides (1, 64)" in said[0]
        plain(x)[0].backward(gradient)
    assert_same_gradients(model, plain)


class Holder:
    """An object that holds itself, so it cannot be taken apart."""

    def __init__(self) -> None:
        self.own, self.tensor = self, torch.ones(1)


class Sometimes(Pairwise):
    """Returns an object that holds itself beside its tensors, once it was asked to."""

    around: dict[str, object] | None = None

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return found if self.around is None else (found[0], self.around)


def test_a_root_that_runs_whole_may_return_what_no_plan_could() -> None:
    model, x = Sometimes(), torch.randn(64, 8)
    planned = Rockmate(model, x, 2**20)
    holder = Holder()
    model.around = {"holder": holder}
    out, around = planned(x)
    out.sum().backward()
    assert around["holder"] is holder
