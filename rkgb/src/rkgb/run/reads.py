"""Guards on values: a forward's reads of values, evaluated again for another call.

A recording holds for every call in which Python reads the same values: whether the mask is all
ones, how many rows are chosen, whether the largest label is in range. Only values that follow from
inputs, buffers and constants are evaluated before the step runs; this takes few operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rkgb.elements.op import Op, call_op, run_op
from rkgb.graphs.basic import BasicGraph, Read
from rkgb.graphs.uses import live_ops
from rkgb.torch_api.private.autograd import straight_to_kernels


@dataclass(frozen=True)
class Outcomes:
    """The guards on values of a recorded forward, and how to evaluate them."""

    basic: BasicGraph

    @cached_property
    def parts(self) -> tuple[tuple[tuple[Op, ...], Read], ...]:
        """For each guard, the operations that it needs beyond those of earlier guards."""
        basic = self.basic
        done: set[int] = set()
        found = []
        for read in basic.reads:
            needed = _leading(basic, read) - done
            done |= needed
            found.append((tuple(basic.ops[index] for index in sorted(needed)), read))
        return tuple(found)

    @property
    def texts(self) -> tuple[str, ...]:
        """For each guard, what was read, where, and the recorded value."""
        return tuple(map(str, self.basic.reads))

    def hold(self, external: Mapping[str, Tensor]) -> bool:
        """Return whether all guards hold for a call with these external values."""
        if not self.basic.reads:
            return True
        values: dict[str, Any] = dict(external)
        try:
            with torch.no_grad(), straight_to_kernels():
                return all(self._holds(ops, read, values) for ops, read in self.parts)
        except (RuntimeError, IndexError, ValueError):  # the operations fail for these values
            return False

    def _holds(self, ops: Sequence[Op], read: Read, values: dict[str, Any]) -> bool:
        for op in ops:
            run_op(op, values)
        return bool(seen(read, values) == read.value)


def seen(read: Read, values: Mapping[str, Any]) -> Any:
    """Return the value that a guard compares."""
    if read.kind == "content":
        return content_of(values[read.op.inputs[0]])
    made = call_op(read.op, values)
    if read.kind == "number":
        return made
    return tuple(tuple(t.shape) for t in (made if isinstance(made, (tuple, list)) else (made,)))


def content_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the elements of a tensor and its shape, for comparison."""
    return (tuple(tensor.shape), *tensor.detach().reshape(-1).tolist())


def _leading(basic: BasicGraph, read: Read) -> set[int]:
    """Return the operations of the forward on which a guard depends."""
    ops = basic.ops[: read.position]
    return set(live_ops(basic.infos, ops, read.op.inputs, lambda _: False))
