"""Python may ask what is one object: inside of a part that runs whole, and around it."""

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


class Returning(nn.Module):
    """Counts, and returns what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, *, as_it_is: bool) -> Tensor:
        self.calls += 1
        return x if as_it_is else x.view_as(x)


class AroundReturning(nn.Module):
    """Asks whether it got back what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(32, 32), Returning(), nn.Linear(32, 32)

    def forward(self, x: Tensor, *, are_one: bool = True) -> Tensor:
        x = self.first(x)
        y = self.part(x, as_it_is=are_one)
        result: Tensor = self.last(x.sin() + y if y is x else y.cos())
        return result


class Tied(nn.Module):
    """Multiplies otherwise by a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 8)
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        x = x @ weight + self.weight.sum() if weight is self.weight else x @ weight.sin()
        return x * scale if scale is self.scale else x - scale


class AroundTied(nn.Module):
    """Hands a part what is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.other = nn.Linear(32, 32), Tied(), nn.Linear(32, 32)

    def forward(self, x: Tensor, *, are_one: bool = True) -> Tensor:
        part = self.part
        weight, scale = part.weight, part.scale
        if not are_one:
            weight, scale = self.other.weight, part.scale + 1
        result: Tensor = self.other(part(self.first(x), weight, scale))
        return result


def same_gradients(ours: Iterable[Tensor], plain: Iterable[Tensor]) -> bool:
    pairs = [(a.grad, b.grad) for a, b in zip(ours, plain, strict=True)]
    return all(b is None if a is None else b is not None and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", [Attending, Around, AroundReturning, AroundTied])
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
        assert x.grad is not None
        assert same_gradients((x, *model.parameters()), (own, *twin.parameters()))
        assert all(map(torch.equal, model.buffers(), twin.buffers()))
        model.zero_grad()
        twin.zero_grad()
