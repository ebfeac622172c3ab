"""A forward that looks at values of its inputs: each way through it has its plan, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rkgb import SideEffectError
from rockmate import Rockmate


class Masked(nn.Module):
    """Looks at a mask, at labels, at how many rows are chosen, and at a list of lengths."""

    threshold: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("threshold", torch.tensor(0.5))

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        assert labels.max() < 8, "a label out of range"
        y = torch.tanh(self.linear(x))
        if not bool((mask > self.threshold).all()):
            y = y * mask[:, None]
        chosen = self.out(y[labels > 2])
        first = labels.tolist()[0]
        return y.square().mean() + chosen.sum() * 0.1 + first * y.mean()


def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(3)
    ones, padded = torch.ones(6), torch.tensor([1.0, 1, 1, 1, 0, 0])
    few, many = torch.tensor([1, 5, 0, 1, 2, 0]), torch.tensor([1, 5, 7, 3, 4, 0])
    kinds = [(ones, few), (padded, few), (ones, many), (padded, few), (ones, few)]
    return [(torch.randn(6, 16), mask, labels) for mask, labels in kinds]


def steps(model: nn.Module) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen: list[Any] = []
    for batch in batches():
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return seen


def test_each_way_through_a_forward_is_planned_once() -> None:
    torch.manual_seed(0)
    model = Masked()
    twin = copy.deepcopy(model)
    wrapped = Rockmate(model, batches()[0], "1MiB")
    found, expected = steps(wrapped), steps(twin)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    ways = len(list(wrapped._rockmate.plans))
    assert ways == 3, "padded or not, few or many"
    assert all(torch.equal(a, b) for a, b in zip(steps(wrapped), steps(twin), strict=True))
    assert len(list(wrapped._rockmate.plans)) == ways, "every way was known"


def test_an_assert_on_values_still_fires() -> None:
    wrapped = Rockmate(Masked(), batches()[0], "1MiB")
    x, mask, labels = batches()[0]
    with pytest.raises(AssertionError, match="a label out of range"):
        wrapped(x, mask, labels + 7)
    wrapped(x, mask, labels).backward()


def test_a_buffer_that_changes_leads_another_way() -> None:
    model = Masked()
    twin = copy.deepcopy(model)
    wrapped = Rockmate(model, batches()[1], "1MiB")
    for module in (wrapped, twin):
        module.threshold.fill_(-1.0)
    assert torch.equal(wrapped(*batches()[1]), twin(*batches()[1]))


def test_what_follows_from_parameters_is_not_looked_at_beforehand() -> None:
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y / y.abs().max().item() if y.abs().max() > 1 else y * 3

    torch.manual_seed(0)
    model = nn.Sequential(Clipped(), nn.Linear(8, 8))
    twin = copy.deepcopy(model)
    wrapped = Rockmate(model, torch.randn(4, 8), "1MiB")
    assert wrapped.plan.opaque == ("0",)
    for scale in (0.01, 10.0):
        sample = torch.randn(4, 8) * scale
        assert torch.equal(wrapped(sample), twin(sample))


@dataclasses.dataclass
class Output:
    value: Tensor
    rest: dict[str, Any]


class Cache:
    """A user's object, with a constructor of its own."""

    def __init__(self, layers: int) -> None:
        self.tensors: list[Tensor] = []
        self.layers = layers


class Batch:
    def __init__(self, x: Tensor, name: str) -> None:
        self.x, self.name = x, name


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.config = {"size": 8}

    def forward(self, batch: Batch) -> tuple[Output, Cache, Any]:
        cache = Cache(1)
        y = self.linear(batch.x)
        cache.tensors.append(y.detach())
        return Output(y.sum(), {"name": batch.name, "again": y}), cache, self.config


def test_arguments_and_results_of_the_users_own_types() -> None:
    model = Structured()
    twin = copy.deepcopy(model)
    wrapped = Rockmate(model, (Batch(torch.randn(3, 8), "a"),), "1MiB")
    for name in ("a", "b"):
        batch = Batch(torch.randn(3, 8), name)
        ours, cache, config = wrapped(batch)
        theirs, _, _ = twin(batch)
        assert type(ours) is Output
        assert type(cache) is Cache
        assert cache.layers == 1
        assert torch.equal(cache.tensors[0], theirs.rest["again"])
        assert config == model.config
        assert ours.rest["name"] == name
        ours.value.backward()
        theirs.value.backward()
        assert torch.equal(model.linear.weight.grad, twin.linear.weight.grad)  # type: ignore[arg-type]


class Store:
    """A cache of one's own: it says nothing of the tensors that it holds."""

    def __init__(self) -> None:
        self.items: list[Tensor] = []
        self.rows = 0

    def update(self, x: Tensor) -> Tensor:
        self.items.append(x)
        self.rows += len(x)
        return torch.cat(self.items)


class Filling(nn.Module):
    """Puts what it computes into its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, store: Store, *, notes: dict[str, Any]) -> Tensor:
        every = store.update(self.first(x))
        notes["count"] = notes.get("count", 0) + 1
        notes["norms"] = every.norm(dim=1)
        return self.second(every).tanh()


def test_arguments_that_a_forward_fills_are_filled() -> None:
    torch.manual_seed(0)
    model = Filling()
    twin = copy.deepcopy(model)

    def batch(step: int) -> tuple[Tensor, Store, dict[str, Any]]:
        torch.manual_seed(step)
        store = Store()
        store.update(torch.randn(4, 16))
        return torch.randn(32, 16), store, {"weight": torch.ones(())}

    x, store, notes = batch(0)
    wrapped = Rockmate(model, (x, store), "1MiB", kwargs={"notes": notes})
    assert (len(store.items), list(notes)) == (1, ["weight"]), "planning leaves them alone"
    for step in range(3):
        x, ours, our_notes = batch(step)
        _, plain, plain_notes = batch(step)
        wrapped(x, ours, notes=our_notes).sum().backward()
        twin(x, plain, notes=plain_notes).sum().backward()
        assert_same_gradients(model, twin)
        assert (ours.rows, our_notes["count"]) == (plain.rows, plain_notes["count"]) == (36, 1)
        assert all(map(torch.equal, ours.items, plain.items))
        assert torch.equal(our_notes["norms"], plain_notes["norms"])
    assert len(wrapped.plans) == 1
    empty = Store()
    with pytest.raises(SideEffectError, match="puts tensors into an argument, a Store"):
        Rockmate(model, (x, empty), "1MiB", kwargs={"notes": {}})
    assert empty.items == []
