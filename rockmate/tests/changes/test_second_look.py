"""Calls are recorded once more: what nobody saw change is found before it computes."""

from __future__ import annotations

import copy
import functools
import logging
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rockmate
from oracles.training import eager_copy, loss_of
from rkgb import capture
from rkgb.device.chosen import trace_memory
from rockmate import InfeasibleBudgetError, Rockmate, RockmateError, UnsupportedModuleError
from rockmate.calls import second_look as module_under_test
from zoo.nets import network


def set_unseen(value: float) -> None:
    """Change what a forward below reads, where no guard can look: inside of the interpreter."""
    sys.setswitchinterval(value)


@pytest.fixture(autouse=True)
def _unseen() -> Iterator[None]:
    before = sys.getswitchinterval()
    set_unseen(0.5)
    yield
    set_unseen(before)


class Block(nn.Module):
    """Multiplies by what nobody sees, or takes another way by it."""

    def __init__(self, how: str = "scale") -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(16, 16), nn.Linear(16, 16), how

    def forward(self, x: Tensor) -> Tensor:
        seen = sys.getswitchinterval()
        if self.how == "way":
            return self.b(self.a(x).relu() if seen > 0.4 else self.a(x).sin())
        return self.b(self.a(x).sin() * seen)


def net(how: str = "scale") -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), Block(how), nn.GELU(), nn.Linear(16, 16))


def step(module: nn.Module, x: Tensor) -> list[Tensor | None]:
    module.zero_grad()
    result = module(x)
    result.square().sum().backward()
    return [result, *(p.grad for p in module.parameters())]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


class Looks:
    """Counts looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = capture.look_again

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module_under_test, "look_again", counted)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


class Remembers(nn.Module):
    """Keeps what its first forward computes, outside of itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ _lower(x.shape[-1])


@functools.lru_cache
def _lower(size: int) -> Tensor:
    return torch.tril(torch.ones(size, size))


def test_a_forward_that_only_first_computes_what_it_keeps() -> None:
    """The recordings of other backwards, beside the planned one, are second forwards."""
    model = nn.Sequential(nn.Linear(16, 16), Remembers(), nn.GELU(), nn.Linear(16, 16))
    plain, x = copy.deepcopy(model), torch.randn(8, 16)
    _lower.cache_clear()
    try:
        planned = Rockmate(model, x, 0.01, cost="flops", self_test=False)
    except InfeasibleBudgetError as least:
        _lower.cache_clear()
        planned = Rockmate(model, x, least.minimum_bytes, cost="flops", self_test=False)
    for _ in range(2):
        assert_same(step(planned, x), step(plain, x))
    _lower.cache_clear()
    assert_same(step(planned, x), step(plain, x))


class Kept(nn.Module):
    """Multiplies by what its first forward keeps where no guard can look."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.exp(torch.tanh(self.a(x)) * _factors(16))).tanh()


@functools.lru_cache
def _factors(size: int) -> Tensor:
    return torch.full((size,), 2.0)


@pytest.mark.parametrize("budget", [2**20, 0.01])
def test_what_the_first_forward_keeps_is_what_later_ones_read(budget: float) -> None:
    """Also where a look would not fit: recordings for other gradients are looks, too."""
    torch.manual_seed(0)
    model = Kept()
    plain, x = copy.deepcopy(model), torch.randn(8, 16)
    _factors.cache_clear()
    try:
        planned = Rockmate(model, x, budget, cost="flops", cache=False)
    except InfeasibleBudgetError as least:
        _factors.cache_clear()
        planned = Rockmate(model, x, least.minimum_bytes, cost="flops", cache=False)
    for _ in range(3):
        assert_same(step(planned, x), step(plain, x))
        _factors(16).mul_(1.5)


@pytest.mark.parametrize("how", ["scale", "way"])
@pytest.mark.parametrize("quiet", [0, 1])
def test_what_changes_is_found_before_it_runs(
    how: str, quiet: int, caplog: pytest.LogCaptureFixture
) -> None:
    module, x = net(how), torch.randn(32, 16)
    plain, planned = copy.deepcopy(module), Rockmate(module, x, "1MiB", cost="flops")
    for _ in range(quiet):
        assert_same(step(planned, x), step(plain, x))
    assert planned.plan.opaque == ()
    with caplog.at_level(logging.WARNING, "rockmate"):
        for seen in (0.25, 0.125, 0.5, 0.45):
            set_unseen(seen)
            assert_same(step(planned, x), step(plain, x))
    assert planned.plan.opaque == ("2",), "nothing but the block that decides by it"
    assert len(planned.plans) == 1
    assert "module '2' (test_second_look.py:" in caplog.text
    assert "module '2' (test_second_look.py:" in planned.plans[0].why


def test_a_call_planned_on_the_spot_is_looked_at_once(looks: Looks) -> None:
    module, x = net(), torch.randn(32, 16)
    plain, planned = copy.deepcopy(module), Rockmate(module, x, "1MiB", cost="flops")
    for _ in range(4):
        step(planned, x)
    assert looks.count == 2
    longer = torch.randn(48, 16)
    assert_same(step(planned, longer), step(plain, longer))
    assert looks.count == 2, "this very call was recorded"
    set_unseen(0.25)
    assert_same(step(planned, longer), step(plain, longer))
    assert looks.count == 3
    assert planned._rockmate.settings.opaque == ("2",)


def test_every_nth_call_is_looked_at(looks: Looks) -> None:
    module, x = net(), torch.randn(32, 16)
    plain = copy.deepcopy(module)
    planned = rockmate.apply(module, x, "1MiB", cost="flops", check_every=5)
    for _ in range(11):
        assert_same(step(planned, x), step(plain, x))
    assert looks.count == 4
    set_unseen(0.25)
    for _ in range(4):
        step(planned, x)
    assert_same(step(planned, x), step(plain, x))
    assert planned.plan.opaque == ("2",)


@pytest.mark.parametrize("wrong", [-1, 0.5, True, "often"])
def test_other_words_are_refused(wrong: Any) -> None:
    with pytest.raises(rockmate.UnknownChoiceError, match="check_every"):
        Rockmate(net(), torch.randn(32, 16), "1MiB", check_every=wrong)


def test_a_look_on_demand(looks: Looks) -> None:
    module, x = net(), torch.randn(32, 16)
    plain, planned = copy.deepcopy(module), Rockmate(module, x, "1MiB", cost="flops")
    for _ in range(3):
        step(planned, x)
    assert planned.check(x) == ()
    assert str(planned.check(x)) == "nothing differs from the recording"
    set_unseen(0.25)
    found = planned.check(x)
    assert [difference.module_path for difference in found] == ["2"]
    assert "'mul' took 0.5 when recorded, and takes 0.25 now" in str(found)
    assert_same(step(planned, x), step(plain, x))

    count = looks.count
    assert planned.check() == (), "the next call will tell"
    assert looks.count == count
    step(planned, x)
    step(planned, x)
    assert looks.count == count + 1, "which is the one after a new plan, too"


def test_no_look_where_nothing_is_planned(looks: Looks) -> None:
    planned, x = Rockmate(net(), torch.randn(32, 16), "1MiB", cost="flops"), torch.randn(32, 16)
    planned.eval()
    with pytest.raises(RockmateError, match="run by the plain module"):
        planned.check(x)
    planned(x)
    assert looks.count == 0


def test_strict_refuses() -> None:
    planned = Rockmate(net(), torch.randn(32, 16), "1MiB", cost="flops", strict=True)
    set_unseen(0.25)
    with pytest.raises(UnsupportedModuleError, match=r"'2' of Sequential .* takes 0.25 now"):
        planned(torch.randn(32, 16))


class Noisy(nn.Module):
    """Has state of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.first(x)))
        self.seen = x.detach().mean()
        return self.last(x)


def test_a_step_that_is_looked_at_is_the_same_step(looks: Looks) -> None:
    module, x = Noisy(), torch.randn(32, 16)
    plain, planned = copy.deepcopy(module), Rockmate(module, x, "1MiB", cost="flops")
    for _ in range(3):
        stream, python = torch.get_rng_state(), random.getstate()
        ours = step(planned, x)
        after = torch.get_rng_state()
        torch.set_rng_state(stream)
        assert_same(ours, step(plain, x))
        assert torch.equal(after, torch.get_rng_state())
        assert python == random.getstate()
        assert torch.equal(planned.seen, plain.seen)
        for a, b in zip(planned.buffers(), plain.buffers(), strict=True):
            assert torch.equal(a, b)
    assert looks.count == 2
    assert planned.plan.opaque == ()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["gpt", "resnet", "mixer"])
def test_looks_stay_within_the_budget(name: str, looks: Looks) -> None:
    _assert_within_the_budget(*network(name), 1.0, looks)


def test_looks_count_what_a_plan_writes_over_gradients(looks: Looks) -> None:
    layers = [nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 1)]
    _assert_within_the_budget(nn.Sequential(*layers), torch.randn(64, 16), 1.3, looks)


class Attention(nn.Module):
    """Its backward reads parts of one tensor, each of which a look gives memory with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*heads.unbind(0))
        return x + self.outer(y.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("share", [1.0, 1.03, 1.1])
def test_looks_count_memory_between_the_parts_of_a_tensor(share: float, looks: Looks) -> None:
    model = nn.Sequential(*(Attention() for _ in range(3)), nn.Linear(32, 4))
    _assert_within_the_budget(model, torch.randn(4, 64, 32), share, looks)


def _assert_within_the_budget(model: nn.Module, sample: Any, share: float, looks: Looks) -> None:
    try:
        Rockmate(eager_copy(model), sample, 1, cost="flops")
    except InfeasibleBudgetError as error:
        budget = int(share * error.minimum_bytes)
    planned = Rockmate(model, sample, budget, cost="flops")
    args = sample if isinstance(sample, tuple) else (sample,)
    for parameter in planned.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(3):
        trace = trace_memory(lambda _: loss_of(planned(*args)).backward(), torch.device("cpu"))
        assert trace.peak_bytes <= planned.budget_bytes
    assert looks.count == 2
    assert planned.plan.opaque == ()


def test_numbers_of_the_call_and_pieces_are_no_difference(looks: Looks) -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor, scale: float) -> Tensor:
            return x * scale if x.sum() < 1000 else x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.inner = nn.Linear(16, 16), Inner()

        def forward(self, x: Tensor, scale: float, other: float) -> Tensor:
            return self.inner(self.linear(x).sin() * other, scale * 0.5 + 1)

    module, x = Net(), torch.randn(32, 16)
    plain = copy.deepcopy(module)
    planned = Rockmate(module, (x, 1.0, 2.0), "1MiB", cost="flops")
    for place in range(8):
        scales = (1 - place / 10, 2 + place / 7)
        assert torch.equal(planned(x, *scales), plain(x, *scales))
    assert planned.plan.opaque == ("inner",)
    assert len(planned.plans) == 2
    assert looks.count >= 2
