"""Parts that run whole and keep tensors with their history: losses may be made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rkgb.errors import OpaquePieceError
from rockmate import InfeasibleBudgetError, Rockmate

ELSEWHERE: dict[str, Tensor] = {}


class Part(nn.Module):
    """Decides by a value, so that it runs whole."""

    def __init__(self, keep: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(16, 16), keep
        self.kept: list[Tensor] = []
        self.named: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.keep(self, h)
        return h * 2 if h.mean().item() > 0 else h


def _cleared(part: Part, h: Tensor) -> None:
    part.kept.clear()
    part.kept.append(h.square())


KEPT: dict[str, tuple[Callable[[Any, Tensor], None], Callable[[Any], Tensor]]] = {
    "tensor": (lambda p, h: setattr(p, "aux", h.square().mean()), lambda p: p.aux),
    "list": (lambda p, h: setattr(p, "kept", [h, h.sin()]), lambda p: p.kept[1].sum()),
    "cleared list": (_cleared, lambda p: p.kept[0].sum()),
    "dict": (lambda p, h: p.named.update(aux=h.cos()), lambda p: p.named["aux"].sum()),
}


class Around(nn.Module):
    """Reads what its parts have left, or leaves that to its user."""

    def __init__(self, name: str, *, reads: bool) -> None:
        super().__init__()
        keep, self.find = KEPT[name]
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.parts = nn.ModuleList(Part(keep) for _ in range(2))
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for part in self.parts:
            x = part(x).tanh()
        y: Tensor = self.last(x)
        return y + self.losses() if self.reads else y

    def losses(self) -> Tensor:
        return sum((self.find(part) for part in self.parts), torch.zeros(()))


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("name", KEPT)
def test_a_loss_of_what_is_kept_trains_as_plain_pytorch_does(name: str, reads: bool) -> None:
    torch.manual_seed(0)
    model = Around(name, reads=reads)
    twin = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(8, 16), "1MiB", cost="flops")
    for step in range(4):
        x = torch.randn(8, 16)
        for module, inner in ((planned, model), (twin, twin)):
            module.zero_grad()
            loss = module(x).square().sum()
            if step != 2:  # whose own loss is all there is
                loss = loss + inner.losses()
            loss.backward()
        assert_same_gradients(model, twin)


def test_what_grows_with_each_call_is_left_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Part(lambda p, h: p.kept.append(h.detach())))
    planned = Rockmate(model, torch.randn(8, 16), "1MiB", cost="flops")
    for count in range(1, 4):
        planned(torch.randn(8, 16)).sum().backward()
        assert len(model[1].kept) == count


def _elsewhere(part: Part, h: Tensor) -> None:
    ELSEWHERE["aux"] = part.linear.weight * 2


def test_a_gradient_by_what_is_kept_elsewhere_is_refused() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), Part(_elsewhere))
    planned = Rockmate(model, torch.randn(8, 16), "1MiB", cost="flops")
    planned(torch.randn(8, 16)).sum().backward()  # nobody asks for it
    with pytest.raises(OpaquePieceError, match=r"module '2'.*elsewhere than in its attributes"):
        (planned(torch.randn(8, 16)).sum() + ELSEWHERE["aux"].sum()).backward()


class Retaining(nn.Module):
    """Decides by a value, and retains the gradient of what it returns or has inside."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        h = x.clamp(-1, 1).square()
        out = h + x.clamp_min(0.1).sqrt() if x.mean().item() < 100 else h
        self.kept = h if self.inside else out
        if self.kept.requires_grad:
            self.kept.retain_grad()
        return out


@pytest.mark.parametrize("inside", [False, True])
def test_a_part_that_retains_a_gradient_is_not_run_again(*, inside: bool) -> None:
    """A second run would make another tensor, and that one would get the gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Retaining(inside=inside), nn.Linear(64, 64))
    plain = copy.deepcopy(model)
    sample, options = torch.randn(16, 64), {"planner": "recompute_all", "cost": "flops"}
    try:
        planned = Rockmate(model, sample, 0.01, **options)
    except InfeasibleBudgetError as least:
        planned = Rockmate(model, sample, least.minimum_bytes, planner="auto", cost="flops")
    for _ in range(2):
        x = torch.randn(16, 64)
        for each in (planned, plain):
            each(x).square().mean().backward()
        assert torch.equal(model[1].kept.grad, plain[1].kept.grad)
        assert_same_gradients(model, plain)
