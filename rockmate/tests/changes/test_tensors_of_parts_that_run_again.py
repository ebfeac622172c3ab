"""Tensors that a part may read when it runs again for the backward: as they were, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rkgb import RkgbError
from rockmate import Rockmate, RockmateError
from runs.planned import computing_again

OUTSIDE = torch.full((8,), 0.5)


def adding(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x + tensor


class Part(nn.Module):
    """It decides by values, and so it runs whole; its backward does not read the tensor."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.linear, self.place = nn.Linear(8, 8), place
        tensor = torch.full((8,), 0.5)
        if place == "buffer":
            self.register_buffer("tensor", tensor)
        elif place in ("parameter", "frozen"):
            self.tensor = nn.Parameter(tensor, requires_grad=place == "parameter")
        else:
            self.tensor = tensor if place == "attribute" else torch.zeros(())
        self.held = [torch.zeros(()), tensor, torch.zeros(())] if place == "list" else []
        self.object = SimpleNamespace(tensor=tensor if place == "object" else None)
        self.function = adding(tensor) if place == "closure" else None

    def read(self) -> Tensor:
        if self.place == "list":
            return self.held[1]
        if self.place == "object":
            found: Tensor = self.object.tensor
            return found
        return OUTSIDE if self.place == "global" else self.tensor

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 100:
            x = x * 0.5
        h = self.linear(x)
        return torch.tanh(h + self.read() if self.function is None else self.function(h))

    def changed(self) -> Tensor:
        """Return the tensor that a loop changes."""
        if self.function is None:
            return self.read()
        return self.function.__closure__[0].cell_contents  # type: ignore[attr-defined, no-any-return]


class Net(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(8, 8), Part(place), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.sin(self.part(self.first(x))))
        return found


def in_place(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(3)


def other_memory(tensor: Tensor) -> None:
    tensor.data = torch.full((8,), 2.0)


def set_to(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.set_(torch.full((8,), 2.0))  # type: ignore[call-overload]


def uncounted(tensor: Tensor) -> None:
    tensor.data.copy_(torch.full((8,), 2.0))


def by_numpy(tensor: Tensor) -> None:
    tensor.detach().numpy()[:] = 3


PLACES = ("parameter", "frozen", "buffer", "attribute", "list", "object", "closure", "global")
CHANGES = (in_place, other_memory, set_to, uncounted, by_numpy)


def planned(place: str, budget: Any = 10**6) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Net(place)
    theirs = copy.deepcopy(model)
    return Rockmate(model, torch.randn(64, 8), budget, self_test=False, cost="flops"), theirs


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", PLACES)
def test_a_change_before_the_part_runs_again_is_refused(
    place: str, change: Callable[[Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "OUTSIDE", torch.full((8,), 0.5))
    with computing_again("recompute_all"):
        rk, _ = planned(place)
    named = {"list": "part.held", "object": "part.object", "closure": "tensor' around adding"}
    name = "OUTSIDE" if place == "global" else named.get(place, r"part\.tensor")
    y = rk(torch.randn(64, 8))
    change(rk.part.changed())  # type: ignore[union-attr, operator]
    with pytest.raises((RkgbError, RockmateError), match=f"{name}.* was changed"):
        y.sum().backward()
    x = torch.randn(64, 8)  # nothing is left of the step
    rk(x).sum().backward()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", PLACES)
def test_a_change_of_what_no_part_reads_again_is_as_in_plain_pytorch(
    place: str, change: Callable[[Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rk, theirs = planned(place)
    x = torch.randn(64, 8)
    for model in (rk, theirs):
        monkeypatch.setitem(globals(), "OUTSIDE", torch.full((8,), 0.5))
        other_memory_for_all(model)
        y = model(x)
        change(model.part.changed())  # type: ignore[union-attr, operator]
        y.sum().backward()
    for p, q in zip(rk.parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == (not p.requires_grad)
        assert p.grad is None or torch.equal(p.grad, q.grad)


def other_memory_for_all(model: nn.Module) -> None:
    """Let the closure, which a deep copy shares, begin as at first."""
    with torch.no_grad():
        model.part.changed().copy_(torch.full((8,), 0.5))  # type: ignore[union-attr, operator]


class Odd(nn.Module):
    """It has tensors that are not in memory as bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear = nn.Linear(8, 8), nn.Linear(8, 8)
        self.sum = torch.eye(8).to_sparse()
        self.shape = torch.empty(3, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.part(x)

    def part(self, x: Tensor) -> Tensor:
        if x.mean() > 100:
            x = x * 0.5
        found: Tensor = torch.tanh(self.linear(x)) * len(self.shape) * self.sum.shape[0]
        return found


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd, self.last = Odd(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.sin(self.odd(x)))
        return found


def test_tensors_without_bytes_are_no_hindrance() -> None:
    torch.manual_seed(0)
    model = Around()
    theirs = Around()
    theirs.load_state_dict(model.state_dict())
    with computing_again("recompute_all"):
        rk = Rockmate(model, torch.randn(64, 8), 10**6, self_test=False, cost="flops")
    for _ in range(3):
        x = torch.randn(64, 8)
        rk(x).sum().backward()
        theirs(x).sum().backward()
    for p, q in zip(rk.parameters(), theirs.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


class Twice(nn.Module):
    """Two parts whose closures, and the variables in them, have the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.one, self.other = Part("closure"), Part("closure")

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.one(self.first(x)))
        found: Tensor = self.last(torch.sin(self.other(x)))
        return found


@pytest.mark.parametrize("name", ["one", "other"])
def test_tensors_of_one_name_are_told_apart(name: str) -> None:
    with computing_again("recompute_all"):
        rk = Rockmate(Twice(), torch.randn(64, 8), 10**6, self_test=False, cost="flops")
    y = rk(torch.randn(64, 8))
    uncounted(getattr(rk, name).changed())
    with pytest.raises((RkgbError, RockmateError), match=r"tensor' around adding.* was changed"):
        y.sum().backward()
