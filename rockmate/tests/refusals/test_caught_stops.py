"""What ends a recording, inside of a `try` of the forward that would go another way then."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rockmate import Rockmate


def body(count: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(count)])


class Catching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = body(2), body(1)

    def change(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        try:
            h = self.change(h)
        except:  # noqa: E722 (it is what is tried)
            h = h * 3
        y: Tensor = self.last(h)
        return y


class Branches(Catching):
    def change(self, h: Tensor) -> Tensor:
        return h * 2 if h.sum() < 1e9 else h


class Numbers(Catching):
    def change(self, h: Tensor) -> Tensor:
        return h * h.detach().abs().max().item()


class Seeds(Catching):
    def change(self, h: Tensor) -> Tensor:
        torch.manual_seed(0)
        return h * 2


class Casts(Catching):
    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Parameter(torch.randn(16, 16, 16))

    def change(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.bilinear(h, h, self.form).float()


class Nests(Catching):
    """A recording has no way to say what a nested tensor's sizes are: it raises an error itself."""

    def change(self, h: Tensor) -> Tensor:
        return h * torch.nested.nested_tensor([torch.ones(16)]).to_padded_tensor(0.5)[0]


class Writes(Catching):
    def forward(self, x: Tensor) -> Tensor:
        try:
            x.mul_(2)
        except:  # noqa: E722
            x = x * 3
        return super().forward(x)

    def change(self, h: Tensor) -> Tensor:
        return h


class Suppresses(Branches):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        with contextlib.suppress(BaseException):
            h = self.change(h)
        y: Tensor = self.last(h)
        return y


class Returns(Branches):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        try:
            h = self.change(h)
        finally:
            return self.last(h)  # noqa: B012


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        try:
            return gradient * 2 if gradient.sum() < 1e9 else gradient
        except:  # noqa: E722
            return gradient * 3


class InBackward(Catching):
    def change(self, h: Tensor) -> Tensor:
        doubled: Tensor = _Doubled.apply(h)  # type: ignore[no-untyped-call]
        return doubled


@pytest.mark.parametrize("self_test", [True, False])
@pytest.mark.parametrize(
    "kind", [Branches, Numbers, Seeds, Casts, Nests, Writes, Suppresses, Returns, InBackward]
)
def test_the_forward_goes_the_way_of_plain_pytorch(kind: type[nn.Module], self_test: bool) -> None:
    torch.manual_seed(0)
    plain = kind()
    model = copy.deepcopy(plain)
    sample = torch.randn(8, 16)
    rk = Rockmate(model, sample.clone(), 1 << 20, self_test=self_test, cost="flops", progress=False)
    for step in range(3):
        x, results = torch.randn(8, 16), []
        for module in (rk, plain):
            module.zero_grad()
            torch.manual_seed(step)
            results.append(module(x.clone()))
            results[-1].square().mean().backward()
        assert torch.equal(*results)
        assert_same_gradients(model, plain)
