"""Which operations are called in one way: what torch's bindings look at, and no sizes."""

from __future__ import annotations

import pytest
import torch

from rkgb.costs import call_kind, op_key
from rkgb.elements.op import Op, Ref
from rkgb.elements.tensor_info import TensorInfo

aten = torch.ops.aten
INFOS = {
    name: TensorInfo.of(tensor, name, tensor.untyped_storage().nbytes())
    for name, tensor in {
        "small": torch.zeros(3),
        "large": torch.zeros(2, 30, 4),
        "expanded": torch.zeros(1).expand(5, 6),
        "scalar": torch.zeros(()),
        "whole": torch.zeros(3, dtype=torch.int64),
    }.items()
}


def kind(target, *args, **kwargs) -> str:
    op = Op("made", target, args, kwargs, results=("made",))
    return call_kind(op_key(op, INFOS))


@pytest.mark.parametrize("other", ["large", "expanded", "scalar"])
def test_sizes_and_strides_mean_nothing(other) -> None:
    assert kind(aten.mul.Tensor, Ref("small"), Ref(other)) == kind(
        aten.mul.Tensor, Ref(other), Ref("small")
    )
    sizes = (2, 30, 4), (120, 4, 1)
    assert kind(aten.as_strided.default, Ref("small"), (3,), (1,)) == kind(
        aten.as_strided.default, Ref(other), *sizes
    )


def test_kinds_of_arguments_and_names_differ() -> None:
    x = Ref("small")
    kinds = [
        kind(aten.mul.Tensor, x, x),
        kind(aten.mul.Scalar, x, 2),
        kind(aten.mul.Scalar, x, 2.0),
        kind(aten.mul.Tensor, x, Ref("whole")),
        kind(aten.add.Tensor, x, x),
        kind(aten.add.Tensor, x, x, alpha=2),
        kind(aten.max_pool2d_with_indices.default, x, [2, 2]),
        kind(aten.max_pool3d_with_indices.default, x, [2, 2]),
        kind(aten.sum.dim_IntList, x, [0], True),
        kind(aten.sum.dim_IntList, x, [0]),
        kind(aten.sum.dim_IntList, x, None),
    ]
    assert len(set(kinds)) == len(kinds)
