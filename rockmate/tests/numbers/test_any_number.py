"""Python numbers that only enter arithmetic: one plan for all of them, with the bits of each."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rkgb import TraceError
from rockmate import Rockmate

SPECIAL = (0.0, 1.0, -0.0, -2.5, 2.0, math.inf, math.nan, 1e-30, 1e30)


class Net(nn.Module):
    """Computes with a number between two layers."""

    def __init__(self, compute: Callable[[Tensor, Any], Tensor], layers: int = 1) -> None:
        super().__init__()
        self.t: Any = 0.25
        self.first = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.last, self.compute = nn.Linear(8, 4), compute

    def forward(self, x: Tensor, t: Any = None, more: Any = None) -> Tensor:
        t = self.t if t is None else t
        for layer in self.first:
            x = self.compute(layer(x).sin(), t if more is None else more["t"] * t)
        return self.last(x)


def pair(compute: Callable[[Tensor, Any], Tensor], **options: Any) -> tuple[Rockmate, Net]:
    torch.manual_seed(0)
    model = Net(compute, options.pop("layers", 1))
    twin = copy.deepcopy(model)
    call = options.pop("call", {"x": torch.randn(6, 8), "t": 0.25})
    model.t = twin.t = call.pop("set_t", 0.25)
    budget = options.pop("budget", "1MiB")
    return Rockmate(model, call, budget, cost="flops", self_test=False, **options), twin


def sample(where: str, t: float = 0.25) -> dict[str, Any]:
    return {"x": torch.randn(6, 8), where: t}


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def assert_alike(
    rk: nn.Module, twin: nn.Module, loss: Callable[[Tensor], Tensor] = Tensor.sum, **call: Any
) -> None:
    """One step each, from one random state: the same bits everywhere, those of nan too.

    With `set_t` in place of `t`, the number is set as the attribute of both.
    """
    if "set_t" in call:
        rk.t = twin.t = call.pop("set_t")
    state = torch.get_rng_state()
    ends, found = [], []
    for module in (rk, twin):
        torch.set_rng_state(state)
        module.zero_grad()
        result = module(**call)
        loss(result).backward()
        found.append([result, *(p.grad for p in module.parameters())])
        ends.append(torch.get_rng_state())
    assert torch.equal(*ends)
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(bits(ours), bits(theirs)), call


def serving(rk: Rockmate) -> list[str]:
    """The plans that are for any number."""
    return [row.what for row in rk.plans if "any number" in row.what]


WHERE = ["t", pytest.param("set_t", marks=pytest.mark.nightly)]  # test_attribute_numbers has some

# What a number enters as a scalar, and nothing else depends on.
ENTERING: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "times": lambda x, t: t * x * t,
    "over": lambda x, t: x / t + t / (x + 2),
    "plus": lambda x, t: t - (x + t) + (x - t),
    "alpha": lambda x, t: torch.add(x, x.sin(), alpha=t),
    "power": lambda x, t: (x + 2) ** t,
    "full": lambda x, t: x * torch.full((8,), t) + torch.full_like(x, t) + x.new_full((8,), t),
    "masked": lambda x, t: x.masked_fill(x > t, t) + torch.where(x > 0, x, t) + x.clamp(max=t),
    "in place": lambda x, t: (x + 1).mul_(t).add_(x, alpha=t).div_(t),
    "lerp": lambda x, t: torch.lerp(x, x.sin(), t) + F.softplus(x, t),
    "norm": lambda x, t: F.layer_norm(x, (8,), eps=t) + F.group_norm(x, 2, eps=t),
    "slope": lambda x, t: F.leaky_relu(x, t),
    "dropout": lambda x, t: F.dropout(x, abs(t) % 1.0),
    "arithmetic": lambda x, t: x * (2 * t - 1) + x / (1 + abs(-t)) - t**2 - t % 0.7,
    "least": lambda x, t: x * min(t, 0.5) + (x if t else x * 2) * (t > 0 and t),
    "attention": lambda x, t: (x @ x.T * t).softmax(-1) @ x,
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("where", WHERE, ids=["argument", "attribute"])
@pytest.mark.parametrize("name", ENTERING)
def test_a_number_in_arithmetic_is_planned_for_once(name: str, where: str) -> None:
    rk, twin = pair(ENTERING[name], call=sample(where))
    x = torch.randn(6, 8)
    shares = (0.5, 0.75, 0.1)
    for t in (*shares, *SPECIAL):
        wrong = name in ("slope", "power") and t < 0  # in place of an error, no finite gradients
        if not (wrong or (name == "dropout" and not math.isfinite(t))):
            assert_alike(rk, twin, x=x, **{where: t})
    assert len(serving(rk)) == 1
    before = len(rk.plans)
    for t in (0.3, 0.45, 0.26):
        assert_alike(rk, twin, x=x, **{where: t})
    assert len(rk.plans) == before, "nothing is recorded for another number"


# The same for an int, such as a time step.
WHOLE: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "times": lambda x, t: t * x * t,
    "over": lambda x, t: x / t + t / (x + 2),
    "plus": lambda x, t: t - (x + t) + (x - t),
    "of ints": lambda x, t: x * (torch.arange(8) * t + t),
    "full": lambda x, t: x * torch.full((8,), t) + torch.full_like(x, t) + x.new_full((8,), t),
    "in place": lambda x, t: (x + 1).mul_(t).add_(x, alpha=t).div_(t),
    "share": lambda x, t: F.dropout(x, t / 1000) * (1 - t / 1000),
    "arithmetic": lambda x, t: x * (2 * t - 1) + x / (1 + abs(-t)) - t % 701 + t // 0.5,
    "schedule": lambda x, t: x * min(1.0, t / 1000) * (1 if t > 3 else 2),
    "power": lambda x, t: (x + 2) ** (t / 100),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("where", WHERE, ids=["argument", "attribute"])
@pytest.mark.parametrize("name", WHOLE)
def test_an_int_in_arithmetic_is_planned_for_once(name: str, where: str) -> None:
    rk, twin = pair(WHOLE[name], call=sample(where, 500))
    x = torch.randn(6, 8)
    for t in (400, 401, 2, 700, 1):
        assert_alike(rk, twin, x=x, **{where: t})
    assert len(serving(rk)) == 1
    before = len(rk.plans)
    for t in (17, 333, 400, 402, 651):
        assert_alike(rk, twin, x=x, **{where: t})
    assert len(rk.plans) == before, "nothing is recorded for another int"
    for t in (0.25, 0.5, 0.75):
        assert_alike(rk, twin, x=x, **{where: t})
    if name in ("times", "schedule"):
        assert_alike(rk, twin, x=x, **{where: True})


WHOLE_DECIDING: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "size": lambda x, t: x[:, :t].sum() * x,
    "dimension": lambda x, t: x.sum(t - 4, keepdim=True) * x,
    "range": lambda x, t: sum((x * i for i in range(t)), x),
    "index": lambda x, t: x * [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0][t],
    "row": lambda x, t: x * x[t - 4],
    "text": lambda x, t: x * (3 if "5" in f"{t}" else 1),
    "hash": lambda x, t: x * {5: 2.0}.get(t, 1.0),
    "power of ints": lambda x, t: x * (2**t + 10 ** (t - 5)),
    "power": lambda x, t: x**t,
    "bits": lambda x, t: x * (t & 1) + (t << 1) * x,
    "float": lambda x, t: x * float(t),
    "math": lambda x, t: x * math.sqrt(t),
    "tensor": lambda x, t: x * torch.tensor([t]),
    "type": lambda x, t: x * (t + 1 if type(t) is int else t),
    "isinstance": lambda x, t: x * t if isinstance(t, int) else x,
    "repeat": lambda x, t: x.repeat(t, 1).sum() * x,
    "shape": lambda x, t: torch.full((t,), 2.0).sum() * x,
    "steps": lambda x, t: x * (t // 3) + t % 2,
    "one hot": lambda x, t: x * F.one_hot(torch.arange(6) % t, 8).float(),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("where", WHERE, ids=["argument", "attribute"])
@pytest.mark.parametrize("name", WHOLE_DECIDING)
def test_an_int_that_decides_more_is_never_taken_for_another(name: str, where: str) -> None:
    rk, twin = pair(WHOLE_DECIDING[name], call=sample(where, 5))
    x = torch.randn(6, 8)
    for t in (4, 5, 3, 5, 4, 3, 5):
        assert_alike(rk, twin, x=x, **{where: t})
    assert name == "isinstance" or not serving(rk)


def test_an_int_that_changes_beside_one_that_decides() -> None:
    def compute(x: Tensor, t: Any) -> Tensor:
        return x[:, : t[0]].sum() * x * t[1] * t[2]

    rk, twin = pair(compute, call={"x": torch.randn(6, 8), "t": [3, 5, 0.5]})
    x = torch.randn(6, 8)
    for step in range(12):
        assert_alike(rk, twin, x=x, t=[3 + (step > 8), step, 0.1 * step])
    assert len(serving(rk)) == 2, "one for each size"
    assert len(rk.plans) <= 4


# Where the value of a number decides more than scalars, or where nobody sees what is done with it.
DECIDING: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "math": lambda x, t: x * math.sqrt(abs(t)),
    "floor": lambda x, t: x * 2 if math.floor(t) > 1 else x,
    "float": lambda x, t: x * max(float(t), 0.3),
    "int": lambda x, t: x * int(t * 4),
    "round": lambda x, t: x * round(t, 1),
    "text": lambda x, t: x * (3 if "5" in f"{t}" else 1),
    "hash": lambda x, t: x * {0.5: 2.0}.get(t, 1.0),
    "hex": lambda x, t: x * float.fromhex(t.hex()),
    "tensor": lambda x, t: x * torch.tensor(t),
    "item": lambda x, t: x * (2 if torch.full((1,), t).item() > 0.4 else 1),
    "look": lambda x, t: x * 2 if (torch.arange(3.0) > t).any() else x,
    "numpy": lambda x, t: x * float(np.clip(t, 0.3, 0.6)),
    "numpy's number": lambda x, t: x * float(np.float64(2.0) * t),
    "type": lambda x, t: x * (max(t, 0.3) if type(t) is float else t),
    "base": lambda x, t: abs(t) ** x,
    "kernel": lambda x, t: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=t)[0],
    "size": lambda x, t: x[: 1 + int(t * 4)].sum() * x,
    "steps": lambda x, t: x * (t // 0.3) + t % 0.25,  # the same for numbers nearby
    "caught": lambda x, t: x * _reciprocal(t),
}


def _reciprocal(t: Any) -> Any:
    try:
        return 1.0 / (t - 0.5)
    except ZeroDivisionError:
        return 7.0


@pytest.mark.one_in(8)
@pytest.mark.parametrize("where", WHERE, ids=["argument", "attribute"])
@pytest.mark.parametrize("name", DECIDING)
def test_a_number_that_decides_more_is_never_taken_for_another(name: str, where: str) -> None:
    rk, twin = pair(DECIDING[name], call=sample(where))
    x = torch.randn(6, 8)
    for t in (0.5, 0.75, 0.1, 0.4, 0.3, 0.55, 1.5, 0.5):
        assert_alike(rk, twin, x=x, **{where: t})
    assert name == "caught" or not serving(rk)


def test_comparisons_choose_among_plans() -> None:
    def compute(x: Tensor, t: Any) -> Tensor:
        if t > 0.5:
            x = x.cos() * t
        return x * (1 - t) if t > 0.2 else x.exp() / (t + 3)

    rk, twin = pair(compute)
    x = torch.randn(6, 8)
    for t in (0.25, 0.3, 0.6, 0.7, 0.0, 0.1):
        assert_alike(rk, twin, x=x, t=t)
    before = rk.plans
    assert len(serving(rk)) == 1, "one line for all ways"
    for t in (0.4, 0.9, -3.0, 0.21, 0.55, 0.15, math.inf):
        assert_alike(rk, twin, x=x, t=t)
    assert len(rk.plans) == len(before)


def test_each_step_keeps_its_own_number() -> None:
    x = torch.randn(64, 8)
    rk, twin = pair(
        lambda x, t: F.dropout(x * t, 0.3).exp() / t,
        **{"layers": 6, "budget": 0.8, "call": {"x": x, "t": 0.25}},
    )
    assert rk.plan.overhead > 0, "some of it runs again"
    for t in (0.25, 0.5):
        assert_alike(rk, twin, x=x, t=t)
    for module in (rk, twin):
        torch.manual_seed(1)
        module.zero_grad()
        first, second = module(x=x, t=0.7), module(x=x, t=-0.3)
        first.sum().backward(retain_graph=True)
        second.sum().backward()
        first.square().sum().backward()
    for ours, theirs in zip(rk.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert len(serving(rk)) == 1


def test_gradients_that_arrive_otherwise() -> None:
    rk, twin = pair(lambda x, t: torch.lerp(x, x.sin(), t) * (1 + t))
    x = torch.randn(6, 8)

    def transposed(y: Tensor) -> Tensor:
        return (y.t().contiguous() * torch.arange(6.0)).sum()

    for t in (0.5, 0.75):
        assert_alike(rk, twin, x=x, t=t)
    for t in (0.1, 0.2, 0.9):
        assert_alike(rk, twin, transposed, x=x, t=t)
        assert_alike(rk, twin, x=x, t=-t)
    assert len(rk.plans) == 2


def test_numbers_in_containers_and_of_other_types() -> None:
    rk, twin = pair(lambda x, t: x * t)
    x = torch.randn(6, 8)
    for t in (0.5, 0.75, 0.1):
        assert_alike(rk, twin, x=x, t=t, more={"t": 1.0 - t})
    assert len(serving(rk)) == 1
    for t in (2, 3, True, np.float64(0.5), 0.5):  # the last but two are neither float nor int
        assert_alike(rk, twin, x=x, t=t)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for t in (0.5, 0.7, 0.9):
            assert_alike(rk, twin, lambda y: y.float().sum(), x=x, t=t)
    assert len(serving(rk)) in (3, 4), "in a container, alone, as an int, and under autocast"


def test_what_is_returned_is_the_calls_own_number() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, t: float) -> tuple[Tensor, float]:
            return self.linear(x) * t, t

    x = torch.randn(3, 4)
    rk = Rockmate(Returns(), {"x": x, "t": 0.5}, "1MiB", cost="flops", self_test=False)
    for t in (0.25, 0.75, 0.1):
        result, own = rk(x=x, t=t)
        result.sum().backward()
        assert own == t
        assert type(own) is float


NUMBERS = st.floats(-4, 4) | st.sampled_from(SPECIAL) | st.integers(-4, 4)
EXPRESSIONS = st.recursive(
    st.sampled_from(["t", "s", "0.5", "2", "1.0"]),
    lambda parts: st.one_of(
        st.tuples(parts, st.sampled_from(["+", "-", "*", "/", "%", "**"]), parts).map(
            lambda p: f"({p[0]} {p[1]} {p[2]})"
        ),
        st.tuples(parts, st.sampled_from(["<", "=="]), parts, parts, parts).map(
            lambda p: f"({p[3]} if {p[0]} {p[1]} {p[2]} else {p[4]})"
        ),
        parts.map(lambda p: f"abs({p})"),
        st.tuples(parts, parts).map(lambda p: f"max({p[0]}, {p[1]})"),
    ),
    max_leaves=5,
)


class Expressions(nn.Module):
    """Computes scalars with expressions."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scalars = eval(f"lambda t, s: ({', '.join(texts)},)")

    def forward(self, x: Tensor, t: float, s: float) -> Tensor:
        factor, added, divisor = self.scalars(t, s)
        return (self.linear(x) * factor + added).tanh() / divisor


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@example(["t", "t", "(t / (t - t))"], [])
@given(st.lists(EXPRESSIONS, min_size=3, max_size=3), st.lists(st.tuples(NUMBERS, NUMBERS)))
def test_any_arithmetic_of_any_numbers(texts: list[str], calls: list[tuple[float, float]]) -> None:
    torch.manual_seed(0)
    model = Expressions(*texts)
    twin, x = copy.deepcopy(model), torch.randn(3, 4)
    sample: dict[str, Any] = {"x": x, "t": 0.3, "s": 0.6}
    try:
        model(**sample)
    except (ArithmeticError, TypeError, RuntimeError) as error:
        with pytest.raises(TraceError, match=type(error).__name__):
            Rockmate(twin, sample, "1MiB", cost="flops", self_test=False)
        return
    rk = Rockmate(twin, sample, "1MiB", cost="flops", self_test=False)
    for t, s in [(0.4, 0.7), (2, 0.7), (3, 2), *calls]:
        try:
            model(x, t, s)
        except (ArithmeticError, TypeError, RuntimeError) as error:
            with pytest.raises(type(error)):
                rk(x=x, t=t, s=s)
            continue
        assert_alike(rk, model, lambda y: y.abs().sum(), x=x, t=t, s=s)
