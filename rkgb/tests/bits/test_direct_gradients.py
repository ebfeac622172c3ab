"""Gradients of logits made out of probabilities, against torch's two kernels for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.one_by_one import run
from rkgb.elements.op import Op, Ref
from rkgb.elements.tensor_info import TensorInfo
from rkgb.rows.losses import direct

aten = torch.ops.aten
NONE, MEAN, SUM = range(3)


def recorded(
    targets: list[int], reduction: int, weight: Tensor | None = None
) -> tuple[list[Op], dict[str, Tensor]]:
    values = {
        "logits": torch.log_softmax(torch.randn(len(targets), 5, dtype=torch.float64), 1),
        "targets": torch.tensor(targets),
        "tangent": torch.tensor(3.0, dtype=torch.float64),
        "total": torch.tensor(float(sum(t != -100 for t in targets)), dtype=torch.float64),
    }
    if weight is not None:
        values["weight"] = weight
    given: tuple[Any, ...] = (
        *(Ref("tangent"), Ref("logits"), Ref("targets"), None if weight is None else Ref("weight")),
        *(reduction, -100, Ref("total")),
    )
    back = (Ref("of loss"), Ref("logits"), 1, torch.float64)
    ops = [
        Op("of loss", aten.nll_loss_backward.default, given, {}, ("of loss",)),
        Op("made", aten._log_softmax_backward_data.default, back, {}, ("made",)),
    ]
    return ops, values


def infos(values: dict[str, Tensor]) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo.of(value, name, value.numel() * value.element_size())
        for name, value in values.items()
    }


@pytest.mark.parametrize("reduction", [MEAN, SUM])
@pytest.mark.parametrize("targets", [[0, 4, -100, 2], [-100, -100], [3]])
def test_probabilities_make_what_the_kernels_make(targets: list[int], reduction: int) -> None:
    """Ignored rows get zeros, also where there are no others and the mean is none."""
    torch.manual_seed(0)
    ops, given = recorded(targets, reduction)
    expected = run(ops, given)
    found, added = direct(ops, infos(expected), ())
    assert all(op.target is not aten.nll_loss_backward.default for op in found)
    values = run(found, given)
    torch.testing.assert_close(values["made"], expected["made"], rtol=1e-12, atol=1e-12)
    for name, info in added.items():
        assert (info.shape, info.dtype) == (tuple(values[name].shape), values[name].dtype), name


@pytest.mark.parametrize("left", [(), ("of loss",)])
@pytest.mark.parametrize("weight", [None, torch.ones(5, dtype=torch.float64)])
def test_other_losses_keep_their_kernels(weight: Tensor | None, left: tuple[str, ...]) -> None:
    ops, given = recorded([0, 1], MEAN, weight)
    found, added = direct(ops, infos(run(ops, given)), left)
    assert (found == ops, added == {}) == ((weight is not None or bool(left)),) * 2
