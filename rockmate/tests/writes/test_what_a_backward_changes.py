"""What Python of a Function's backward changes, every step changes once, as a plain one does."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from oracles.training import assert_same_gradients
from rockmate import Rockmate, apply_to_blocks

_seen: list[int] = []
_kept: dict[str, Tensor] = {}


def _count(name: str) -> Callable[[Any, Tensor], Tensor]:
    def work(module: Any, grad: Tensor) -> Tensor:
        setattr(module, name, getattr(module, name) + 1)
        return grad * float(getattr(module, name))

    return work


def _append(module: Any, grad: Tensor) -> Tensor:
    module.list.append(len(module.list))
    return grad * len(module.list)


def _append_outside(_: Any, grad: Tensor) -> Tensor:
    _seen.append(1)
    return grad


def _keep(_: Any, grad: Tensor) -> Tensor:
    _kept["last"] = grad * 1
    return grad


CHANGES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "attribute": _count("count"),
    "private": _count("_count"),
    "list": _append,
    "list outside": _append_outside,
    "gradient outside": _keep,
    "random": lambda _, grad: grad * random.random(),
}


class Changing(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return ctx.module.work(ctx.module, grad), None


class Net(nn.Module):
    def __init__(self, work: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.work, self.count, self._count = work, 0, 0
        self.list: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(Changing.apply(self.first(x), self).sin())
        return y


@pytest.mark.parametrize("name", CHANGES)
def test_every_step_changes_it_once(name: str) -> None:
    torch.manual_seed(0)
    model = Net(CHANGES[name])
    twin = copy.deepcopy(model)
    _seen.clear()
    planned = Rockmate(model, torch.randn(8, 16), "1MiB", cost="flops")
    for step in range(3):
        x, found = torch.randn(8, 16), []
        for module, own in ((planned, model), (twin, twin)):
            random.seed(step)
            _seen.clear()
            _kept.clear()
            module.zero_grad()
            module(x).square().sum().backward()
            kept = [*_kept.values()]
            found.append((own.count, own._count, own.list, [*_seen], random.random(), len(kept)))
            found.append(kept[0] if kept else torch.ones(1))
        assert found[0] == found[2]
        assert torch.equal(found[1], found[3])
        assert_same_gradients(model, twin)


class Whole(nn.Module):
    """For another reason it runs whole, so that no recording has seen its backward's Python."""

    def __init__(self, work: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.sizes = Net(work), Sizes()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x * self.sizes.scale(x.dim()))
        return y


class Sizes:
    @functools.lru_cache  # noqa: B019 (as users do)
    def scale(self, number: int) -> float:
        return 1 / number


@pytest.mark.parametrize("name", CHANGES)
def test_planning_a_part_that_runs_whole_changes_nothing(name: str) -> None:
    module = Whole(CHANGES[name])
    _seen.clear()
    _kept.clear()
    state = random.getstate()
    planned = Rockmate(
        nn.Sequential(module, nn.Linear(16, 16)),
        (torch.randn(4, 16),),
        1_000_000,
        cost="flops",
        self_test=False,
    )
    inner = module.inner
    assert (inner.count, inner._count, inner.list, _seen, _kept) == (0, 0, [], [], {})
    assert random.getstate() == state
    for step in range(1, 3):
        planned(torch.randn(4, 16)).sum().backward()
        assert inner.count + inner._count + len(inner.list) + len(_seen) in (0, step)


class Free(nn.Module):
    """Blocks that are planned, and a part that is none of them."""

    def __init__(self, work: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.blocks = Net(work), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x).tanh()
        return x


@pytest.mark.parametrize("name", ["list outside", "gradient outside"])
def test_planning_by_blocks_changes_nothing_outside(name: str) -> None:
    torch.manual_seed(0)
    model = Free(CHANGES[name])
    twin = copy.deepcopy(model)
    _seen.clear()
    _kept.clear()
    apply_to_blocks(model, torch.randn(4, 16), "1MiB", cost="flops", blocks=["Linear"])
    assert (_seen, _kept) == ([], {})
    for _ in range(2):
        x, found = torch.randn(4, 16), []
        for module in (model, twin):
            _seen.clear()
            module.zero_grad()
            module(x).square().sum().backward()
            found.append(([*_seen], [*_kept]))
        assert found[0] == found[1]
        assert_same_gradients(model, twin)
