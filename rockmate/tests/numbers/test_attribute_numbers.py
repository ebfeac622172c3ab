"""Numbers among a module's attributes that only enter arithmetic: one plan for all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rockmate import Rockmate


class Net(nn.Module):
    """Numbers in a submodule of torch's, in one of a user's, and at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.2), nn.LayerNorm(8)
        self.slope = nn.LeakyReLU(0.1)
        self.last = nn.Linear(8, 4)
        self.scale, self.temperature = 2, 0.5
        self.calls = 0  # no forward reads it

    def forward(self, x: Tensor) -> Tensor:
        x = self.slope(self.norm(self.drop(self.first(x).sin())))
        q = x[None, None]
        x = F.scaled_dot_product_attention(q, q, q, dropout_p=self.drop.p)[0, 0]
        return self.last(x * self.scale / self.temperature)


class Pair:
    """A planned module and a plain one, which are set and stepped alike."""

    def __init__(self, model: nn.Module, x: Tensor, **options: Any) -> None:
        self.twin = copy.deepcopy(model)
        budget = options.pop("budget", "1MiB")
        self.rk = Rockmate(model, x, budget, cost="flops", self_test=False, **options)
        self.x = x

    def set(self, target: str, value: Any) -> None:
        path, _, name = target.rpartition(".")
        for module in (self.rk, self.twin):
            setattr(module.get_submodule(path), name, value)

    def step(self, loss: Callable[[Tensor], Tensor] = Tensor.sum, x: Tensor | None = None) -> None:
        """One step each, from one random state: the same bits everywhere."""
        start, ends, found = torch.get_rng_state(), [], []
        for module in (self.rk, self.twin):
            torch.set_rng_state(start)
            module.zero_grad()
            result = module(self.x if x is None else x)
            loss(result).backward()
            grads = (p.grad for p in module.parameters())
            found.append([result, *(g for g in grads if g is not None)])
            ends.append(torch.get_rng_state())
        assert torch.equal(*ends)
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)

    def steps(self, target: str, *values: Any) -> int:
        """Step with these numbers; return how many plans that made."""
        before = len(self.rk.plans)
        for value in values:
            self.set(target, value)
            self.step()
        return len(self.rk.plans) - before


def net_pair() -> Pair:
    torch.manual_seed(0)
    return Pair(Net(), torch.randn(6, 8))


def test_attributes_of_all_modules_are_planned_for_once() -> None:
    pair = net_pair()
    pair.step()
    assert pair.steps("temperature", 0.25, 0.3, 0.7, -2.0) == 1
    assert pair.steps("scale", 3, 5, 17) == 1
    assert pair.steps("drop.p", 0.3, 0.4, 0.45) == 1
    assert pair.steps("slope.negative_slope", 0.3, 0.45) == 1
    assert pair.steps("norm.eps", 1e-3, 1e-2) == 1
    for scale in (2, 3):  # all of them otherwise at once
        pair.set("temperature", 0.1 * scale)
        pair.set("drop.p", 0.1 * scale)
        assert pair.steps("scale", scale) == 0
    whys = [row.why for row in pair.rk.plans]
    assert whys.count("numbers among attributes that only enter arithmetic") == 5


def test_what_changes_beside_them_is_planned_for() -> None:
    pair = net_pair()
    pair.steps("temperature", 0.5, 0.25, 0.3)
    for x in (torch.randn(3, 8), torch.randn(9, 8)):
        for value in (0.4, 0.6, 0.7):
            pair.set("temperature", value)
            pair.step(x=x)
    pair.step(lambda y: (y.t().contiguous() * torch.arange(6.0)).sum())
    pair.set("drop.training", False)
    pair.steps("temperature", 0.1, 0.2)
    pair.set("drop.p", 0.0)
    pair.steps("temperature", 0.1, 0.2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pair.step(lambda y: y.float().sum())


def test_one_set_before_a_backward_that_is_recorded_anew() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(6, 8)
    rk = Rockmate(net, x, 1_000_000, cost="flops")
    net.drop.p = 0.3
    y = rk(x)
    net.drop.p = 0.4
    (y.t().contiguous() * torch.arange(6.0)).sum().backward()  # laid otherwise than planned
    assert net.drop.p == 0.4


@pytest.mark.one_in(3)
@pytest.mark.parametrize("value", [torch.tensor(0.3), "no number", None, True])
def test_one_that_is_no_number_any_more(value: Any) -> None:
    class Either(Net):
        def forward(self, x: Tensor) -> Tensor:
            t = self.temperature
            return super().forward(x) if isinstance(t, float) else self.last(x) * (1 + (t is None))

    pair = Pair(Either(), torch.randn(6, 8))
    pair.steps("scale", 3, 4)
    pair.set("temperature", value)
    pair.step()
    pair.steps("temperature", 0.5, 0.25, 0.75)
    pair.steps("scale", value if isinstance(value, Tensor) else 2.5, 3.5, 4)


class Closure(nn.Module):
    """A function in it reads the very module that it was made in: copies would be read past."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.t = nn.Linear(8, 4), 0.5
        holder = [self]
        self.own = lambda x: compute(holder[0], x)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.linear(x)) * self.t


CLOSURES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "scalar": lambda module, x: x * module.t,
    "comparison": lambda module, x: x * 2 if module.t > 0.6 else x,
    "tensor": lambda module, x: x * torch.tensor(module.t),
    "table": lambda module, x: x * vars(module).get("t", 1.0),
    "a comparison there": lambda module, x: x * 2 if vars(module).get("t", 1.0) > 0.6 else x,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CLOSURES)
def test_a_function_that_reads_the_module_itself(name: str) -> None:
    torch.manual_seed(0)
    model, twin = Closure(CLOSURES[name]), Closure(CLOSURES[name])
    twin.load_state_dict(model.state_dict())
    pair = Pair(model, torch.randn(6, 8))
    pair.twin = twin
    pair.step()
    for value in (0.25, 0.55, 0.75, 0.5):
        pair.set("t", value)
        pair.step()
        assert model.t == value


def test_a_default_of_the_class() -> None:
    class Default(nn.Module):
        t = 0.5

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.own = nn.Linear(8, 4), lambda x: x * type(self).t

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.t

    pair = Pair(Default(), torch.randn(6, 8))
    pair.steps("t", 0.5, 0.25, 0.55, 0.75)
    for module in (pair.rk, pair.twin):
        del module.t
    pair.step()


def test_a_copy_and_a_failed_step() -> None:
    class Picky(Net):
        def forward(self, x: Tensor) -> Tensor:
            if self.temperature > 3:
                raise ValueError("too hot")
            return super().forward(x)

    pair = Pair(Picky(), torch.randn(6, 8))
    pair.steps("temperature", 0.5, 0.25)
    pair.set("temperature", 4.0)
    with pytest.raises(ValueError, match="too hot"):
        pair.step()
    assert pair.rk.temperature == 4.0
    assert pair.steps("temperature", 0.3, 0.4) == 0
    ours, theirs = copy.deepcopy(pair.rk), pair.twin
    pair.rk = ours
    assert pair.steps("temperature", 0.6, 0.7) == 0
    pair.rk, pair.twin = ours, theirs


TARGETS = ("temperature", "scale", "drop.p", "norm.eps", "slope.negative_slope", "drop.training")
VALUES = st.sampled_from((0.0, 1.0, 0.5, 2, 3, 0.25, 0.125, 1e-3, 0.9))


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(TARGETS), VALUES), min_size=4, max_size=10))
def test_any_attribute_at_any_step(changes: list[tuple[str, float]]) -> None:
    pair = net_pair()
    for target, value in changes:
        is_share = target == "drop.p" and not 0 <= value <= 1
        if not is_share and (target, value) not in (("temperature", 0.0), ("norm.eps", 0.0)):
            pair.set(target, bool(value) if target == "drop.training" else value)
            pair.step()
