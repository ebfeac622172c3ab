"""Series of operations without a backward: what is compiled of them, and that they make the same.

The operations themselves are the oracle; compiled code rounds otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.one_by_one import run
from rkgb.compiled import compile_series, products_first
from rkgb.elements.op import Op, Ref

aten = torch.ops.aten
CPU = torch.device("cpu")


def op(name: str, target: Any, *args: Any) -> Op:
    given = tuple(Ref(arg) if isinstance(arg, str) else arg for arg in args)
    return Op(name=name, target=target, args=given, kwargs={}, results=(name,))


GATED = (
    op("gate", aten.mm.default, "x", "wg"),
    op("seen", aten.view.default, "gate", [2, 4, 8]),
    op("silu", aten.silu.default, "seen"),
    op("up", aten.mm.default, "x", "wu"),
    op("up_seen", aten.view.default, "up", [2, 4, 8]),
    op("product", aten.mul.Tensor, "silu", "up_seen"),
    op("flat", aten.view.default, "product", [8, 8]),
    op("turned", aten.t.default, "wd"),
    op("down", aten.mm.default, "flat", "turned"),
    op("sum", aten.add.Tensor, "down", "x"),
)


def given() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(8, 8) for name in ("x", "wg", "wu", "wd")}


def test_what_is_no_product_waits_for_one_that_needs_it() -> None:
    """Neighbours then; results are the same, and an order that has them already stays."""
    ordered = products_first(GATED)
    names = [each.name for each in ordered]
    assert names[:2] == ["gate", "up"]
    assert names[-2:] == ["down", "sum"]
    ours, theirs = run(ordered, given()), run(GATED, given())
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert products_first(ordered) == ordered


def test_what_follows_at_once_comes_along() -> None:
    """Both gradients of a product of factors are made where the first one is needed."""
    ops = (
        op("a", aten.mul.Tensor, "x", "wu"),
        op("b", aten.mul.Tensor, "x", "wg"),
        op("first", aten.mm.default, "a", "wd"),
        op("later", aten.neg.default, "b"),
        op("last", aten.mm.default, "later", "first"),
        op("end", aten.neg.default, "last"),
    )
    names = [each.name for each in products_first(ops)]
    assert names == ["a", "b", "later", "first", "last", "end"]


@pytest.mark.slow
def test_a_series_makes_the_same_with_fewer_calls() -> None:
    """Products and views of inputs stay; what is too little to compile, and scatters, do too."""
    values = given()
    like = {name: value.to("meta") for name, value in values.items()}
    scattered = op("spread", aten.scatter_add.default, "sum", 1, "places", "sum")
    values["places"] = torch.arange(64).view(8, 8) % 8
    like["places"] = values["places"].to("meta")
    ops = compile_series((*products_first(GATED), scattered), like, {"sum", "spread"}, CPU)
    names = [each.target_name for each in ops]
    views, others = ["view", "view", "t"], ["mm", "add", "scatter_add"]
    assert names == ["mm", "mm", *views, "compiled_silu", *others]
    ours, theirs = run(ops, values), run((*GATED, scattered), values)
    for name in ("sum", "spread"):
        torch.testing.assert_close(ours[name], theirs[name])
    again = compile_series((*products_first(GATED), scattered), like, {"sum", "spread"}, CPU)
    assert [repr(each.target) for each in again] == [repr(each.target) for each in ops]
    assert all(map(torch.equal, (ours["spread"],), (run(again, values)["spread"],)))
