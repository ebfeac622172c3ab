"""Convolutions in parts along channels, against the convolutions themselves, on random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.one_by_one import run
from rkgb.elements.op import Op, Ref, run_op
from rkgb.elements.tensor_info import TensorInfo
from rkgb.rows.channels import Channels

aten = torch.ops.aten
HOW = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
UP = ([2, 2], [0, 0], [1, 1], True, [0, 0], 1)
IN_GROUPS = (*HOW[:-1], 2)


def images(channels: int) -> Tensor:
    return torch.randn(4, channels, 6, 6, dtype=torch.float64)


def op(target: Any, args: tuple[Any, ...], *results: str) -> Op:
    name = next(filter(None, results))
    many = len(results) > 1
    return Op(name=name, target=target, args=args, kwargs={}, results=results, returns_many=many)


def recorded(
    joined: dict[str, int], how: tuple[Any, ...], slices: tuple[str, ...], *, bias: bool
) -> tuple[list[Op], dict[str, Tensor]]:
    """Return a `cat`, its convolution with the backward, and the slices of its gradient."""
    given = {name: images(count) for name, count in joined.items()}
    total = sum(joined.values())
    given["w"] = torch.randn(total, 6, 2, 2) if how[3] else torch.randn(6, total // how[-1], 3, 3)
    given["w"] = given["w"].double()
    given["bias"] = torch.randn(6, dtype=torch.float64)
    b = Ref("bias") if bias else None
    ops = [
        op(aten.cat.default, ([*map(Ref, joined)], 1), "x"),
        op(aten.convolution.default, (Ref("x"), Ref("w"), b, *how), "y"),
    ]
    y = dict(given)
    for one in ops:
        run_op(one, y)
    given["g"] = torch.randn_like(y["y"])
    mask = [bool(slices), True, bias]
    made = ("gx" if slices else "", "gw", "gbias" if bias else "")
    args = (Ref("g"), Ref("x"), Ref("w"), [6], *how, mask)
    ops.append(op(aten.convolution_backward.default, args, *made))
    start = 0
    for name, count in joined.items():
        if name in slices:
            ops.append(op(aten.slice.Tensor, (Ref("gx"), 1, start, start + count), f"g{name}"))
        start += count
    return ops, given


THREE = {"a": 2, "b": 3, "c": 1}
FIVE = dict.fromkeys("abcde", 2)
# Tensors of the `cat`, arguments, those whose gradients are asked for, whether it runs in parts.
CASES = {
    "two": ({"a": 4, "b": 2}, HOW, ("a", "b"), True),
    "three": (THREE, HOW, ("a", "b", "c"), True),
    "one gradient": (THREE, HOW, ("b",), True),
    "no gradient of inputs": (THREE, HOW, (), True),
    "transposed": ({"a": 4, "b": 2}, UP, ("a", "b"), False),
    "in groups": ({"a": 4, "b": 2}, IN_GROUPS, ("a", "b"), False),
    "many": (FIVE, HOW, tuple(FIVE), False),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_parts_make_the_whole(name: str, bias: bool) -> None:
    torch.manual_seed(0)
    joined, how, slices, is_in_parts = CASES[name]
    ops, given = recorded(joined, how, slices, bias=bias)
    expected = run(ops, given)
    infos = {
        name: TensorInfo.of(value, name, value.numel() * value.element_size())
        for name, value in expected.items()
    }
    parts = [*Channels(ops, infos, ()).in_parts()]
    found = run(parts, given)
    results = [n for one in ops[1:] for n in one.results if n and (n != "gx" or not is_in_parts)]
    for result in results:
        torch.testing.assert_close(found[result], expected[result], rtol=1e-12, atol=1e-12)
    is_read = any("x" in one.inputs for one in parts)
    assert is_read == (not is_in_parts), "neither the `cat` nor its gradient is there"
    assert ("gx" in found) == (bool(slices) and not is_in_parts)


@pytest.mark.parametrize("left", ["x", "gx"])
def test_what_others_read_stays(left: str) -> None:
    ops, given = recorded({"a": 4, "b": 2}, HOW, ("a", "b"), bias=True)
    infos = {
        name: TensorInfo.of(value, name, value.numel() * value.element_size())
        for name, value in run(ops, given).items()
    }
    found = run([*Channels(ops, infos, (left,)).in_parts()], given)
    assert {"x", "gx"} <= found.keys()


def test_other_bits_keep_the_whole() -> None:
    """What is tried are the recorded operations, with the `cat` and the slices, and the parts."""
    ops, given = recorded({"a": 4, "b": 2}, HOW, ("a", "b"), bias=True)
    values = run(ops, given)
    infos = {
        name: TensorInfo.of(value, name, value.numel() * value.element_size())
        for name, value in values.items()
    }
    tried: list[list[str]] = []

    def differ(recorded: Any, others: Any) -> bool:
        tried.append([one.name for one in recorded])
        made = run(others, given)
        assert {"gw", "gbias", "ga", "gb"} <= made.keys()
        return False

    parts = [*Channels(ops, infos, (), differ).in_parts()]
    assert parts == ops
    assert tried == [["x", "gx", "ga", "gb"]]


def test_any_operation_may_read_the_gradient() -> None:
    """Also one with a list among its arguments, which no slice has."""
    ops, given = recorded({"a": 4, "b": 2}, HOW, ("a",), bias=False)
    ops.append(op(aten.sum.dim_IntList, (Ref("gx"), [0]), "sum"))
    expected = run(ops, given)
    infos = {
        name: TensorInfo.of(value, name, value.numel() * value.element_size())
        for name, value in expected.items()
    }
    found = run([*Channels(ops, infos, ()).in_parts()], given)
    torch.testing.assert_close(found["sum"], expected["sum"], rtol=1e-12, atol=1e-12)
