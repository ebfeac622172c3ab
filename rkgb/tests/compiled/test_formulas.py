"""Formulas that compiled pieces use on CPUs: as near to the truth as eager's own kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rkgb.compiled.pieces.formulas import formula_of, suits
from rkgb.elements.op import Op, Ref

aten = torch.ops.aten
X, DY = Ref("x"), Ref("dy")
GELU = {"approximate": "tanh"}
CASES = {
    "tanh": Op("op", aten.tanh.default, (X,), {}, ("y",)),
    "gelu": Op("op", aten.gelu.default, (X,), GELU, ("y",)),
    "gelu_backward": Op("op", aten.gelu_backward.default, (DY, X), GELU, ("y",)),
}
# Errors of both are a few roundings of numbers up to 1, or up to x.
ROUNDINGS = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def both(op: Op, args: list[Any]) -> tuple[Tensor, Tensor]:
    """What the formula makes of the arguments, and the operation."""
    formula = formula_of(op)
    assert formula is not None
    assert suits(args)
    return formula(*args, **op.kwargs), op.target(*args, **op.kwargs)


def tensors(op: Op, x: Tensor) -> list[Any]:
    return [x] if len(op.args) == 1 else [torch.full_like(x, 1.5), x]


@pytest.mark.parametrize("dtype", ROUNDINGS, ids=str)
@pytest.mark.parametrize("name", CASES)
@settings(deadline=None, max_examples=60)
@given(numbers=st.lists(st.floats(-90, 90, width=16), min_size=1, max_size=40))
def test_formulas_are_right_up_to_rounding(
    name: str, dtype: torch.dtype, numbers: list[float]
) -> None:
    op = CASES[name]
    args = tensors(op, torch.tensor(numbers, dtype=dtype))
    ours, _ = both(op, args)
    truth = op.target(*(a.double() for a in args), **op.kwargs)
    assert ours.dtype == dtype
    scale = truth.abs().clamp_min(1.0)
    assert float(((ours.double() - truth).abs() / scale).max()) <= 6 * ROUNDINGS[dtype]


@pytest.mark.parametrize("name", CASES)
def test_formulas_end_as_eager_does_where_numbers_end(name: str) -> None:
    ends = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e30, -1e30, 1e-40, 1e-45]
    ours, theirs = both(CASES[name], tensors(CASES[name], torch.tensor(ends)))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-37, equal_nan=True)
    assert torch.equal(ours.signbit()[:2], theirs.signbit()[:2])


def test_small_numbers_keep_their_digits_in_tanh() -> None:
    x = torch.logspace(-30, 1, 20_000)
    ours, _ = both(CASES["tanh"], [torch.cat([x, -x])])
    truth = torch.cat([x, -x]).double().tanh()
    assert float(((ours.double() - truth) / truth).abs().max()) <= 3 * 2**-23


@pytest.mark.parametrize("rows", [1024, 1040, 1000, 7, 1], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_over_rows(rows: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 300).to(dtype)
    ours, theirs = both(Op("op", aten.sum.dim_IntList, (X, [0], True), {}, ("y",)), [x, [0], True])
    assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    truth = x.double().sum([0], True)
    errors = [(made.double() - truth).abs().max() for made in (ours, theirs)]
    assert float(errors[0]) <= float(errors[1]) + 4 * ROUNDINGS[dtype] * float(truth.abs().max())


def test_other_operations_stay() -> None:
    others = [
        Op("op", aten.gelu.default, (X,), {}, ("y",)),
        Op("op", aten.sum.dim_IntList, (X, [1], True), {}, ("y",)),
        Op("op", aten.sum.dim_IntList, (X, [0]), {}, ("y",)),
        Op("op", aten.sigmoid.default, (X,), {}, ("y",)),
    ]
    assert [formula_of(op) for op in others] == [None] * 4


def test_double_precision_and_other_devices_stay() -> None:
    assert not suits([torch.ones(2, dtype=torch.float64)])
    assert not suits([torch.ones(2), torch.ones(2, device="meta")])
