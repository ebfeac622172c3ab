"""Lazily conjugated and negated tensors in, into and out of parts that run whole."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from runs.planned import wrap

Step = Callable[[Tensor], Tensor]


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.reshape(*x.shape[:-1], 4, 2).contiguous())


def _numbers(z: Tensor) -> Tensor:
    return torch.view_as_real(z.resolve_conj()).flatten(-2)


def _parts(z: Tensor) -> Tensor:
    return torch.cat([z.conj().imag * z.real, z.imag.square()], -1)


def _waves(x: Tensor) -> Tensor:
    return torch.cat([x * x, x.sin()], -1)


class Whole(nn.Module):
    """Looks at sizes that follow from values, so that it runs whole."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        x = self.step(x)
        return x * 2 if len((x.abs() > 1e9).nonzero()) else x


class Around(nn.Module):
    def __init__(self, before: Step, inside: Step, after: Step) -> None:
        super().__init__()
        self.first, self.whole = nn.Linear(8, 8), Whole(inside)
        self.last = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.after(self.whole(self.before(self.first(x)))))


CASES: dict[str, tuple[Step, Step, Step]] = {
    "saved": (_pairs, lambda z: z * z.conj() + z, _numbers),
    "saved of real numbers": (
        torch.tanh,
        lambda x: _numbers(_pairs(x) * _pairs(x).conj()),
        torch.sin,
    ),
    "argument": (lambda x: _pairs(x).conj(), lambda z: z * z.conj() + z.conj(), _numbers),
    "result": (_pairs, lambda z: (z * z).conj(), _numbers),
    "gradient": (_pairs, lambda z: z.conj() * 2, _numbers),
    "negated and saved": (_pairs, _parts, torch.tanh),
    "negated argument": (lambda x: _pairs(x).conj().imag, _waves, torch.tanh),
    "negated result": (_pairs, lambda z: z.conj().imag, _waves),
    "parts of an argument": (lambda x: _pairs(x).conj(), _parts, torch.tanh),
}


@pytest.mark.parametrize("case", CASES)
def test_lazily_read_tensors_have_plain_gradients(case: str) -> None:
    torch.manual_seed(0)
    model = Around(*CASES[case])
    twin, planned = copy.deepcopy(model), wrap(model, torch.randn(32, 8), 21600)
    assert planned.plan.opaque == ("whole",)
    for size in (32, 24, 32):
        x = torch.randn(size, 8)
        for net in (planned, twin):
            net.zero_grad()
            net(x).square().mean().backward()
        assert_same_gradients(model, twin)
    assert planned.plan.opaque == ("whole",)
