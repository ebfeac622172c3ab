"""Operations run one after the other, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from rkgb.elements.op import Op, run_op


def run(ops: Sequence[Op], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what is given, and what the operations make of it."""
    values = dict(given)
    for op in ops:
        run_op(op, values)
    return values
