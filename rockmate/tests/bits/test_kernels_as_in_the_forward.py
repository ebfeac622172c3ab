"""Kernels are those of eager: flags set around or inside a forward, autocast and what it keeps."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)
from torch.nn.attention import SDPBackend, sdpa_kernel

from oracles.training import assert_same_gradients, eager_copy
from rkgb import SideEffectError
from rockmate import InfeasibleBudgetError, Rockmate
from runs.kernels import without_onednn


def planned(model: nn.Module, sample: Any, budget: float | int) -> Rockmate:
    try:
        return Rockmate(model, sample, budget, cost="flops")
    except InfeasibleBudgetError as error:
        return Rockmate(model, sample, error.minimum_bytes, cost="flops")


def assert_equal_step(
    module: nn.Module,
    eager: nn.Module,
    inputs: Callable[[], Tensor],
    around: Callable[[], Any] = contextlib.nullcontext,
) -> None:
    """One step each: `around` the forward only, fresh inputs, and gradients bit for bit."""
    found = []
    for net in (module, eager):
        x = inputs()
        if x.requires_grad and not x.is_leaf:
            x.retain_grad()
        with around():
            result = net(x)
        result.float().square().mean().backward()
        gradients = {name: p.grad for name, p in net.named_parameters()}
        found.append((result.detach(), {**gradients, "input": x.grad}))
        net.zero_grad(set_to_none=True)
    (ours, given), (theirs, expected) = found
    assert torch.equal(ours, theirs)
    for name, gradient in expected.items():
        assert (given[name] is None) == (gradient is None), name
        assert gradient is None or torch.equal(given[name], gradient), name


class WithoutOneDnn(nn.Module):
    """Sets the flag itself, around its own convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        with without_onednn():
            y = self.inner(x)
        return torch.tanh(y)


@pytest.mark.parametrize("budget", [1.0, 0.6])
def test_flags_set_inside_a_forward_belong_to_its_operations(budget: float) -> None:
    torch.manual_seed(0)
    layers = (WithoutOneDnn, lambda: nn.Conv2d(8, 8, 3, padding=1), nn.Tanh)
    model = nn.Sequential(*(make() for _ in range(5) for make in layers))
    x = torch.randn(4, 8, 16, 16)
    eager = eager_copy(model)
    with without_onednn():
        other = eager[1](x)
    assert not torch.equal(other, eager[1](x))  # the flag does choose here
    module = planned(model, x, budget)
    assert (module.plan.overhead > 0) == (budget < 1)
    assert_equal_step(module, eager, lambda: x.clone())
    assert torch.backends.mkldnn.enabled


def test_a_flag_that_a_plan_cannot_set_is_refused() -> None:
    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            torch._C._set_nnpack_enabled(False)
            try:
                return self.inner(x)
            finally:
                torch._C._set_nnpack_enabled(True)

    with pytest.raises(SideEffectError, match="sets a global flag of torch"):
        Rockmate(Sets(), torch.randn(2, 4), 1.0, cost="flops", strict=True)


class Attention(nn.Module):
    """Attention; with `inside`, it chooses its kernel itself."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside, self.qkv, self.out = inside, nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).split(32, dim=2))
        with sdpa_kernel(SDPBackend.MATH) if self.inside else contextlib.nullcontext():
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + torch.tanh(self.out(y.transpose(1, 2).flatten(2)))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inside", "planning", "forward", "both"])
def test_the_kernel_of_attention_is_the_one_that_eager_takes(where: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention(where == "inside") for _ in range(3)))
    x = torch.randn(4, 48, 32)
    eager = eager_copy(model)

    def math() -> Any:
        return sdpa_kernel(SDPBackend.MATH)

    with math() if where in ("planning", "both") else contextlib.nullcontext():
        module = planned(model, x, 560_000 if where == "forward" else 0.7)
    assert module.plan.overhead > 0 or where == "forward"  # that takes more with the other kernel
    around = math if where in ("forward", "both") else contextlib.nullcontext
    for _ in range(2):
        assert_equal_step(module, eager, lambda: x.clone(), around)


# ------------------------------------------------------------------------------------- autocast


class Forked(nn.Module):
    """One input, read by three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) * self.b(x) + self.c(x)).float()


def test_casts_of_an_input_are_shared_where_autocast_shares_them() -> None:
    """It keeps the cast of a leaf for all uses, and casts other tensors anew at each."""
    torch.manual_seed(0)
    model, x = Forked(), torch.randn(64, 32)
    eager = eager_copy(model)
    kinds: dict[str, Callable[[], Tensor]] = {
        "leaf": lambda: x.clone().requires_grad_(),
        "result": lambda: x.clone().requires_grad_() * 1.0,
        "view": lambda: x.clone().requires_grad_()[:],
        "plain": lambda: x.clone(),
    }

    def around() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    with around():
        module = planned(model, kinds["leaf"](), 1.0)
    for make in (*kinds.values(), *kinds.values()):
        assert_equal_step(module, eager, make, around)
    assert str(module.plans).count("planned in") == 3  # a result and a view are one kind


class Cells(nn.Module):
    """A cell stepped in a loop: every step casts its weights."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell: Any = kind(8, 16)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(4, 16)
        for t in range(5):
            if isinstance(self.cell, nn.LSTMCell):
                h, c = self.cell(x[t], (h, c))
            else:
                h = self.cell(x[t], h)
        return h


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_in_a_loop_sum_their_gradients_as_under_autocast(kind: type[nn.RNNCellBase]) -> None:
    torch.manual_seed(0)
    model, x = Cells(kind), torch.randn(5, 4, 8)
    eager = eager_copy(model)

    def around() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    with around():
        module = planned(model, x, 0.9)
    assert_equal_step(module, eager, lambda: x.clone(), around)


# --------------------------------------------------------------------------------- what stays


def test_nothing_of_a_step_of_any_kind_stays_alive() -> None:
    """On a GPU that would be the logits of some steps, until Python looks for cycles."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    module = Rockmate(model, torch.randn(8, 16), "1GiB", cost="flops")

    class Local:
        pass

    def step(rows: int) -> list[weakref.ref[Any]]:
        x, own = torch.randn(rows, 16), Local()
        y = module(x)
        y.sum().backward()
        return [weakref.ref(x), weakref.ref(y), weakref.ref(own)]

    step(4)  # of a second kind, planned for here
    gc.collect()
    gc.disable()
    try:
        for rows in (8, 4, 4, 8):
            assert [alive() for alive in step(rows)] == [None, None, None]
    finally:
        gc.enable()


def test_a_bilinear_form_in_a_region_of_autocast() -> None:
    """One kernel, inside of which autocast casts: no recording below autocast shows it."""
    torch.manual_seed(0)
    model = nn.Sequential(Pairs(), nn.Linear(8, 4))
    twin, x = eager_copy(model), torch.randn(32, 16)
    rk = Rockmate(model, x, "1MiB", cost="flops")
    for net in (rk, twin):
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
        y.float().square().mean().backward()
    assert_same_gradients(model, twin)


class Pairs(nn.Module):
    """A bilinear form of two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(8, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(*x.chunk(2, -1))
