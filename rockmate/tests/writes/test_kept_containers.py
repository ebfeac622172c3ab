"""Tensors that a forward leaves in attributes: in lists, tuples and dicts, with their gradients."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rockmate import Rockmate


@dataclasses.dataclass
class Row:
    value: Tensor


def _append(module: nn.Module, h: Tensor) -> None:
    module.kept = []  # type: ignore[assignment]
    for factor in range(2):
        module.kept.append(h * factor)


def _keep_privately(module: nn.Module, h: Tensor) -> None:
    module._kept = [h]


# What sets an attribute, and what finds the tensor in it afterwards.
KEPT: dict[str, tuple[Callable[[nn.Module, Tensor], None], Callable[[Any], Tensor]]] = {
    "list": (lambda m, h: setattr(m, "kept", [h]), lambda m: m.kept[0]),
    "appended": (_append, lambda m: m.kept[1]),
    "private": (_keep_privately, lambda m: m._kept[0]),
    "nested": (lambda m, h: setattr(m, "kept", (3, [{"a": h}])), lambda m: m.kept[1][0]["a"]),
    "deque": (lambda m, h: setattr(m, "kept", collections.deque([h])), lambda m: m.kept[0]),
    "ordered": (
        lambda m, h: setattr(m, "kept", collections.OrderedDict(a=h)),
        lambda m: m.kept["a"],
    ),
    "dataclass": (lambda m, h: setattr(m, "kept", Row(h)), lambda m: m.kept.value),
}


class Keeps(nn.Module):
    def __init__(self, keep: Callable[[nn.Module, Tensor], None], *, looks: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.keep, self.looks = keep, looks

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).sin()
        self.keep(self, h)
        y: Tensor = self.last(h)
        return y


@pytest.mark.parametrize("has_held", [False, True])
@pytest.mark.parametrize("name", KEPT)
def test_what_lies_in_a_container_is_that_of_the_step(name: str, has_held: bool) -> None:
    keep, find = KEPT[name]
    torch.manual_seed(0)
    model = Keeps(keep)
    if has_held:
        keep(model, torch.zeros(8, 16))
    twin = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(8, 16), "1MiB", cost="flops")
    for _ in range(3):
        x = torch.randn(8, 16)
        for module, inner in ((planned, model), (twin, twin)):
            module.zero_grad()
            (module(x).square().sum() + find(inner).cos().sum()).backward()
        assert torch.equal(find(model), find(twin))
        assert_same_gradients(model, twin)


def test_a_container_of_numbers_is_that_of_the_call() -> None:
    def keep(module: Any, h: Tensor) -> None:
        module.sizes, module.named = list(h.shape), {"rows": h.shape[0]}

    model = Keeps(keep)
    planned = Rockmate(model, torch.randn(8, 16), "1MiB", cost="flops")
    for rows in (8, 4, 8):
        planned(torch.randn(rows, 16)).sum().backward()
        assert (model.sizes, model.named) == ([rows, 16], {"rows": rows})
