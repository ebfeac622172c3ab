"""Every module that torch tests itself with, and randomly generated networks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import rkgb
from oracles.training import assert_trains_like, eager_copy, loss_of, measured_peak_bytes
from rockmate import InfeasibleBudgetError, Rockmate, RockmateError

# ---------------------------------------------------------------------- torch's own modules

# Refused, and why; anything else in the database must be exact.
REFUSED = {
    "BatchNorm": "control flow",  # momentum=None reads the value of a buffer
    "CTCLoss": "",  # its size depends on the data
    "GaussianNLLLoss": "control flow",  # checks the variance's sign
    "Lazy": "without a shape",  # not initialised before its first call
}

# The database draws their random samples in float64, which eager refuses beside a float32 input.
EAGER_REFUSES = {"nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d"}


def _cases() -> list[Any]:
    common = pytest.importorskip(
        "torch.testing._internal.common_modules", reason="expecttest is a test extra"
    )
    return [
        pytest.param(info, id=info.name, marks=[pytest.mark.nightly] if place % 6 else [])
        for place, info in enumerate(common.module_db)
    ]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    return a is b or bool(a == b)


def _step(model: nn.Module, args: Any, kwargs: Any) -> list[Any]:
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), (args, kwargs)
    )
    result = model(*args, **kwargs)
    loss = loss_of(result)
    if loss.requires_grad:
        loss.backward()
    grads = [t.grad for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    grads += [p.grad for p in model.parameters()]
    return [*pytree.tree_leaves(result), *grads, *model.buffers(), torch.get_rng_state()]


def _try(model: nn.Module, args: Any, kwargs: Any) -> tuple[nn.Module | None, str]:
    try:
        return Rockmate(model, tuple(args), "64MiB", kwargs=kwargs, cost="flops"), ""
    except (RockmateError, rkgb.RkgbError) as error:
        return None, str(error)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("info", _cases())
def test_modules_of_torchs_own_database(info: Any) -> None:
    inputs = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
    )
    tried = 0
    for case in inputs[:2]:
        if case.forward_input is None:
            continue
        arguments = case.constructor_input
        model = info.module_cls(*arguments.args, **arguments.kwargs).train()
        args, kwargs = case.forward_input.args, case.forward_input.kwargs
        twin = eager_copy(model)
        state = torch.get_rng_state()
        try:
            expected = _step(twin, args, kwargs)
        except (RuntimeError, ValueError):
            continue  # an input that eager refuses too
        torch.set_rng_state(state)
        tried += 1
        wrapped, refusal = _try(model, args, kwargs)
        if wrapped is None:
            reasons = [text for name, text in REFUSED.items() if name in info.name]
            assert reasons, f"refused without being listed: {refusal}"
            assert reasons[0] in refusal
            continue
        found = _step(wrapped, args, kwargs)
        assert len(found) == len(expected)
        assert all(_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert (tried == 0) == (info.name in EAGER_REFUSES)


# ---------------------------------------------------------------------- random networks


# Parameters whose gradients are reductions, which round by the strides of what they reduce.
FACTORS = {"scale": (), "row": (1, 8), "column": (8, 1)}


class RandomNet(nn.Module):
    """A DAG of random operations on a pool of tensors, fixed by a seed."""

    KINDS = (
        "linear", "norm", "dropout", "relu_", "tanh", "add", "mul", "iadd", "chunk", "cat", "view",
        "slice", "conv", "batch_norm", "expand", "detach", "transpose", "write", "identity",
        "turn", "scale", "row", "column",
    )  # fmt: skip

    def __init__(self, seed: int, length: int) -> None:
        super().__init__()
        self.seed = seed
        self.factors = nn.ParameterDict()
        self.layers = nn.ModuleDict()
        source = random.Random(seed)
        self.plan = tuple(
            (source.choice(self.KINDS), source.random(), source.random()) for _ in range(length)
        )
        width = 8
        for place, (kind, _, _) in enumerate(self.plan):
            if kind == "linear":
                self.layers[str(place)] = nn.Linear(width, width)
            elif kind == "norm":
                self.layers[str(place)] = nn.LayerNorm(width)
            elif kind == "dropout":
                self.layers[str(place)] = nn.Dropout(0.0 if place % 3 == 0 else 0.3)
            elif kind == "conv":
                self.layers[str(place)] = nn.Conv1d(1, 1, 3, padding=1)
            elif kind == "batch_norm":
                self.layers[str(place)] = nn.BatchNorm1d(width)
            elif kind in FACTORS:
                self.factors[str(place)] = nn.Parameter(torch.randn(FACTORS[kind]))
        self.start = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        pool = [self.start(x)]
        for place, (kind, first, second) in enumerate(self.plan):
            a = pool[int(first * len(pool))]
            b = pool[int(second * len(pool))]
            layer = dict(self.layers).get(str(place))
            factor = dict(self.factors).get(str(place))
            pool.append(self._apply(kind, a, b, layer) if factor is None else a * factor)
        # No scalar, which would be taken for the loss that the others get no gradient beside.
        means = torch.stack([t.mean() for t in pool])
        return pool[-1], pool[len(pool) // 2] * 1.0, means

    def _apply(self, kind: str, a: Tensor, b: Tensor, layer: nn.Module | None) -> Tensor:
        if kind == "conv":
            return layer(a.unsqueeze(1)).squeeze(1)  # type: ignore[misc]
        if layer is not None:
            return layer(a)
        match kind:
            case "relu_":
                return (a * 1.5).add_(0.1).relu_()
            case "tanh":
                return torch.tanh(a)
            case "add":
                return a + b
            case "mul":
                return a * b.sigmoid()
            case "iadd":
                c = a * 0.5
                c += b
                return c
            case "chunk":
                left, right = a.chunk(2, dim=1)
                return torch.cat([right, left * 2], dim=1)
            case "cat":
                return torch.cat([a, b], dim=1)[:, ::2]
            case "view":
                return a.reshape(2, -1, 8).reshape(-1, 8)
            case "turn":
                return a.t()
            case "slice":
                return F.pad(a[:, 1:-1], (1, 1))
            case "expand":
                return a.mean(1, keepdim=True).expand(-1, 8)
            case "detach":
                return a.detach() * b
            case "transpose":
                return (a.t() @ b).t()[:4].repeat(2, 1)[: len(a)] if len(a) == 8 else a
            case "write":
                c = torch.zeros_like(a)
                c[:, 2:5] = b[:, 2:5]
                return c
            case _:
                return a.contiguous().view_as(a)


@pytest.mark.slow
@settings(max_examples=4)
@given(seed=st.integers(0, 2**32), length=st.integers(3, 24), share=st.sampled_from([0.7, 1.0]))
@example(seed=0, length=24, share=0.7)
@example(seed=1, length=16, share=0.7)
def test_random_networks(seed: int, length: int, share: float) -> None:
    torch.manual_seed(seed)
    model = RandomNet(seed, length)
    x = torch.randn(8, 8)
    twin = eager_copy(model)
    try:
        wrapped = Rockmate(model, x, share, cost="flops")
    except InfeasibleBudgetError as error:
        wrapped = Rockmate(model, x, error.minimum_bytes, cost="flops")
    assert_trains_like(wrapped, twin, x, steps=2)
    assert wrapped._rockmate.planned.measured_peak_bytes <= wrapped.budget_bytes
    assert measured_peak_bytes(wrapped, x, grads_exist=True) > 0
