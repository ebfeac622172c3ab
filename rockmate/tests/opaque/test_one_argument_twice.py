"""A part that runs whole may ask whether two of its arguments are one object."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from rockmate import Rockmate


class Attending(nn.Module):
    """`nn.MultiheadAttention` multiplies by one matrix where its three arguments are one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(32, 32), nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: Tensor, *, are_one: bool = True) -> Tensor:
        x = self.first(x)
        other = x if are_one else x.view_as(x)
        found: Tensor = self.part(x, other, other, need_weights=False)[0]
        return x + found


class Asking(nn.Module):
    """Does something else with one object, also inside of a list."""

    def forward(self, x: Tensor, others: list[Tensor], *, last: Tensor) -> Tensor:
        for other in others:
            x = x.sin() if other is last else x * other
        return x


class Around(nn.Module):
    """Hands over one tensor in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(32, 32), Asking(), nn.Linear(32, 32)

    def forward(self, x: Tensor, *, are_one: bool = True) -> Tensor:
        x = self.first(x)
        y = x.cos()
        result: Tensor = self.last(self.part(x, [y, x, x + 1], last=y if are_one else x))
        return result


def same_gradients(ours: Iterable[Tensor], plain: Iterable[Tensor]) -> bool:
    pairs = [(a.grad, b.grad) for a, b in zip(ours, plain, strict=True)]
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", [Attending, Around])
@pytest.mark.parametrize("planner", ["none", "recompute_all"])
@pytest.mark.parametrize("begins_as_one", [True, False])
def test_it_computes_what_it_computes_alone(
    kind: type[nn.Module], planner: str, begins_as_one: bool
) -> None:
    model = kind()
    twin = copy.deepcopy(model)
    sample = torch.randn(3, 16, 32)
    given = {"kwargs": {"are_one": begins_as_one}, "self_test": False}
    rk = Rockmate(model, (sample,), 2**24, opaque=["part"], planner=planner, **given)
    for are_one in (begins_as_one, not begins_as_one, begins_as_one):
        x, own = (torch.linspace(-1, 1, 1536).reshape(3, 16, 32).requires_grad_() for _ in "12")
        found, expected = rk(x, are_one=are_one), twin(own, are_one=are_one)
        assert torch.equal(found, expected)
        found.square().mean().backward()
        expected.square().mean().backward()
        assert same_gradients((x, *model.parameters()), (own, *twin.parameters()))
        model.zero_grad()
        twin.zero_grad()
