"""What one kind of operation costs, and what a kind is.

A kind is a kernel with everything that its time and workspace depend on. Operations of one kind
cost the same, so each kind is measured once, however many layers have it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rkgb.elements.op import Op, Ref, map_refs
from rkgb.elements.target import target_of
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.basic import BasicGraph
from rkgb.graphs.uses import made_by
from rkgb.torch_api.by_values import flops_of, has_flops

_NUMBERS = re.compile(r"\d+")
_LISTS = re.compile(r"\[(-?0(, )?)*\]")


def op_key(op: Op, infos: Mapping[str, TensorInfo]) -> str:
    """Return the kind of an operation: equal texts exactly if one measurement serves both."""

    def text(tree: Any) -> str:
        if isinstance(tree, Ref):
            info = infos[tree.name]
            return _kind_of_value(info.dtype, info.shape, info.stride, info.is_conj)
        if isinstance(tree, (list, tuple)):
            return f"[{', '.join(map(text, tree))}]"
        return repr(tree)

    options = [f"{key}={text(value)}" for key, value in op.kwargs.items()]
    call = f"{_name_of(op.target)}({', '.join([*map(text, op.args), *options])})"
    return f"{call} with {op.flags}" if op.flags else call


def call_kind(key: str) -> str:
    """Return the part of an operation's key that decides how torch's bindings parse the call.

    These are its name and the types of its arguments, without sizes and numbers.
    """
    name, _, arguments = key.partition("(")
    return f"{name}({_LISTS.sub('[]', _NUMBERS.sub('0', arguments))}"


@functools.lru_cache(maxsize=1 << 14)
def _kind_of_value(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], is_conj: bool
) -> str:
    return f"{dtype}{list(shape)}{list(stride)}{'conj' if is_conj else ''}"


@functools.lru_cache(maxsize=1 << 12)
def _name_of(target: Callable[..., Any]) -> str:
    return str(target)


def named(op: Op) -> str:
    """Return the description of an operation for errors."""
    return f"'{op.target_name}' ({op.module_path or 'root'}, {op.source})"


def made_bytes(op: Op, infos: Mapping[str, TensorInfo]) -> int:
    """Return the bytes of the storages that the operation makes."""
    return sum(infos[name].counted_bytes for name in made_by(infos, op))


def moved_bytes(op: Op, infos: Mapping[str, TensorInfo]) -> int:
    """Return the bytes that the operation reads and writes; 0 for a view."""
    if not op.writes and not any(infos[name].storage_bytes for name in made_by(infos, op)):
        return 0
    names = dict.fromkeys((*op.inputs, *(n for n in op.results if n)))
    return sum(infos[name].size_bytes for name in names)


def count_flops(op: Op, infos: Mapping[str, TensorInfo]) -> int:
    """Return the FLOPs of one call by torch's formulas; 0 for an operation that has none."""
    known = target_of(op).flops(lambda part: count_flops(part, infos))
    if known is not None:
        return known
    packet = getattr(op.target, "overloadpacket", None)
    if not has_flops(packet):
        return 0

    def stand_in(name: str) -> Tensor:
        return infos[name].empty("meta")

    made = [stand_in(name) if name else None for name in op.results]
    out = tuple(made) if op.returns_many else made[0]
    args, kwargs = map_refs(op.args, stand_in), map_refs(dict(op.kwargs), stand_in)
    return flops_of(packet, args, kwargs, out)


@dataclass(frozen=True)
class FlopCost:
    """A deterministic cost: FLOPs, plus a small weight per byte moved and per operation.

    One millisecond stands for 10^9 FLOPs. The weights (2 per byte, 1000 per operation) give a cost
    to operations without FLOPs.
    """

    flops_per_byte: float = 2.0
    flops_per_op: float = 1000.0

    def time_ms(self, op: Op, infos: Mapping[str, TensorInfo]) -> float:
        """Return the cost of one call as a time."""
        target = target_of(op)
        if target.recorded:
            calls = (target.rounds - 1) * len(target.recorded)
            whole_ms = sum(self.time_ms(part, infos) for part in target.recorded)
            return whole_ms + self.flops_per_op * calls / 1e9
        weighted = self.flops_per_byte * moved_bytes(op, infos) + self.flops_per_op
        return (count_flops(op, infos) + weighted) / 1e9


def kinds_of(basic: BasicGraph, ops: Sequence[Op]) -> dict[str, Op]:
    """Return the first operation of each kind, in order of appearance."""
    kinds: dict[str, Op] = {}
    for op in ops:
        kinds.setdefault(op_key(op, basic.infos), op)
    return kinds
