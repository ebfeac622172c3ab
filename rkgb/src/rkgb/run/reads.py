"""Values that a forward has looked at: found again at another call, from its inputs alone.

A recording holds for every call in which Python would see the same: is the mask all ones, how many
rows are chosen, is the largest label in range. Only what follows from inputs, buffers and constants
is looked at before the step runs; the operations that lead there are few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rkgb.elements.op import Op, map_refs
from rkgb.graphs.basic import BasicGraph, Read
from rkgb.graphs.uses import live_ops
from rkgb.torch_api.torch_private import straight_to_kernels


@dataclass(frozen=True)
class Outcomes:
    """What the forward of a recording has looked at, and how to look again."""

    basic: BasicGraph

    @cached_property
    def parts(self) -> tuple[tuple[tuple[Op, ...], Read], ...]:
        """For each look, the operations that lead there and that no earlier one has run."""
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
        """What was looked at, where, and what was seen."""
        return tuple(map(str, self.basic.reads))

    def hold(self, external: Mapping[str, Tensor]) -> bool:
        """Whether a call with these external values sees what the recording has seen."""
        if not self.basic.reads:
            return True
        values: dict[str, Any] = dict(external)
        try:
            with torch.no_grad(), straight_to_kernels():
                return all(self._holds(ops, read, values) for ops, read in self.parts)
        except (RuntimeError, IndexError, ValueError):  # other values, for which nothing is known
            return False

    def _holds(self, ops: Sequence[Op], read: Read, values: dict[str, Any]) -> bool:
        for op in ops:
            made = _run(op, values)
            results = made if op.returns_many else (made,)
            values.update((n, v) for n, v in zip(op.results, results, strict=False) if n)
        return bool(seen(read, values) == read.value)


def seen(read: Read, values: Mapping[str, Any]) -> Any:
    """Return what a look sees."""
    if read.kind == "content":
        return content_of(values[read.op.inputs[0]])
    made = _run(read.op, values)
    if read.kind == "number":
        return made
    return tuple(tuple(t.shape) for t in (made if isinstance(made, (tuple, list)) else (made,)))


def content_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the elements of a tensor and its shape, to be compared."""
    return (tuple(tensor.shape), *tensor.detach().reshape(-1).tolist())


def _run(op: Op, values: Mapping[str, Any]) -> Any:
    args = map_refs(op.args, values.__getitem__)
    return op.target(*args, **map_refs(dict(op.kwargs), values.__getitem__))


def _leading(basic: BasicGraph, read: Read) -> set[int]:
    """Return the operations of the forward that a look depends on."""
    ops = basic.ops[: read.position]
    return set(live_ops(basic.infos, ops, read.op.inputs, lambda _: False))
