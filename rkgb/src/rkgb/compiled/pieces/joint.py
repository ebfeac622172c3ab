"""What one piece computes: forward and backward, as a function of what comes in.

primals   values that its forward reads and others have made, or that are resident
tangents  what only its backward reads: gradients, and values that others have made
results   values of its forward that others read, then statistics of batch norms
gradients values of its backward that others read, or that are handed over
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rkgb.compiled.pieces.grouping import is_effect
from rkgb.elements.op import BATCH_NORMS, Op, Ref, map_refs
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.simplified import SimplifiedGraph

_aten = torch.ops.aten


@dataclass(frozen=True)
class Statistics:
    """Running statistics that a batch norm of the forward updates: buffers, and how fast."""

    mean: str
    variance: str
    momentum: float


@dataclass(frozen=True)
class Joint:
    """The recorded operations of a piece, and what goes in and comes out."""

    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    primals: tuple[str, ...]
    tangents: tuple[str, ...]
    results: tuple[str, ...]
    gradients: tuple[str, ...]
    statistics: tuple[Statistics, ...]
    effects: tuple[Op, ...]  # updates of counters, which stay operations of their own
    static: frozenset[str]  # of the primals, what is resident
    infos: Mapping[str, TensorInfo]
    written: frozenset[str]  # storages that operations elsewhere write to

    def run(self, primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
        """Run the recorded operations; return results, pairs of statistics, and gradients."""
        values = dict(zip(self.primals, primals, strict=True))
        found: list[Tensor] = []
        for op in self.forward:
            _run(op, values, found)
        made = [self._laid(values[name], name) for name in self.results]
        values.update(zip(self.tangents, tangents, strict=True))
        for op in self.backward:
            _run(op, values, [])
        # Which order a backward finds is known when its forward is compiled: it may be another.
        always = any(op.target_name == "convolution_backward" for op in self.backward)
        gradients = (self._laid(values[name], name, always=always) for name in self.gradients)
        return [*made, *found, *gradients]

    def _laid(self, value: Tensor, name: str, *, always: bool = False) -> Tensor:
        """Return an image as it is to lie in memory; `always` says so even if it lies there."""
        info = self.infos[name]
        if len(info.shape) != 4 or info.alias_of != name or name not in self._alone:
            return value
        for order in (torch.contiguous_format, torch.channels_last):
            like = torch.empty(info.shape, device="meta", memory_format=order)
            if like.stride() == info.stride and (always or value.stride() != info.stride):
                return value.clone(memory_format=order)
        return value

    @cached_property
    def _alone(self) -> frozenset[str]:
        """What shares its memory with nothing else that goes in or comes out."""
        names = (*self.primals, *self.tangents, *self.results, *self.gradients)
        counts = Counter(self.infos[name].alias_of for name in names)
        return frozenset(name for name in names if counts[self.infos[name].alias_of] == 1)

    @property
    def reads_what_it_updates(self) -> bool:
        """Whether it reads a buffer that an update behind it was to change before or after."""
        infos = self.infos
        moved = {name for s in self.statistics for name in (s.mean, s.variance)}
        moved |= {name for op in self.effects for name in op.writes}
        roots = {infos[name].alias_of for name in moved}
        return any(infos[name].alias_of in roots for name in (*self.primals, *self.tangents))

    @cached_property
    def key(self) -> str:
        """A text that two pieces share exactly when one compilation serves both."""
        numbers: dict[str, int] = {}
        lines: list[str] = []

        def number(name: str) -> str:
            if name not in numbers:
                numbers[name] = len(numbers)
                info = self.infos[name]
                root = number(info.alias_of) if info.alias_of != name else "own"
                kept = "static " if name in self.static else ""
                kept += "written" if info.alias_of in self.written else ""
                lines.append(
                    f"{numbers[name]}: {kept}{info.dtype} {info.shape} {info.stride} "
                    f"{info.offset} {info.storage_bytes} {root}"
                )
            return f"#{numbers[name]}"

        def text(tree: Any) -> str:
            return repr(map_refs(tree, lambda name: _Number(number(name))))

        for names in (self.primals, self.tangents):
            lines.append(", ".join(map(number, names)))
        for op in (*self.forward, *self.backward):
            made = ", ".join(number(name) if name else "_" for name in op.results)
            lines.append(f"{made} = {op.target}({text(op.args)}, {text(dict(op.kwargs))})")
        for names in (self.results, self.gradients):
            lines.append(", ".join(map(number, names)))
        return "\n".join(lines)

    @cached_property
    def digest(self) -> str:
        """A short name of the class, the same in every process."""
        return hashlib.sha1(self.key.encode()).hexdigest()[:10]


class _Number:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def joint_of(sg: SimplifiedGraph, index: int) -> Joint:
    """Return what node `index` of `sg` computes."""
    node, infos = sg.nodes[index], sg.dataflow.infos
    effects = tuple(op for op in node.ops if is_effect(op, sg))
    forward = tuple(op for op in node.ops if op not in effects)
    made = {name for op in forward for name in op.results if name}
    primals = dict.fromkeys(n for op in forward for n in _read(op) if n not in made)
    made_behind = {name for op in node.backward for name in op.results if name}
    behind = (n for op in node.backward for n in _read(op))
    tangents = (n for n in behind if n not in made and n not in made_behind and n not in primals)
    readers = _readers(sg)
    own = [name for op in forward for name in op.results if name]
    gradients = [name for op in node.backward for name in op.results if name]
    ours = {id(op) for op in (*node.ops, *node.backward)}
    basic = sg.dataflow.basic
    resident = {*basic.parameters, *basic.buffers, *basic.constants}

    def is_read_outside(name: str) -> bool:
        return any(reader not in ours for reader in readers.get(name, ()))

    return Joint(
        forward=forward,
        backward=node.backward,
        primals=tuple(primals),
        tangents=tuple(dict.fromkeys(tangents)),
        results=tuple(filter(is_read_outside, own)),
        gradients=tuple(filter(is_read_outside, gradients)),
        statistics=tuple(filter(None, map(_statistics, forward))),
        effects=effects,
        static=frozenset(n for n in primals if n in resident),
        infos=infos,
        written=_written(sg, ours),
    )


def _written(sg: SimplifiedGraph, ours: set[int]) -> frozenset[str]:
    """Return the storages that other operations write to, and those that the user may."""
    infos = sg.dataflow.infos
    roots = Counter(infos[name].alias_of for name in sg.output_names)
    outside = sg.dataflow.basic.externals
    shared = (root for root, count in roots.items() if count > 1 or root in outside)
    others = (op for node in sg.nodes for op in (*node.ops, *node.backward) if id(op) not in ours)
    return frozenset((*shared, *(infos[name].alias_of for op in others for name in op.writes)))


_USER = 0  # reads outputs, and takes gradients that are handed over


def _readers(sg: SimplifiedGraph) -> dict[str, set[int]]:
    """Return which operations read each value, by their identity."""
    readers: dict[str, set[int]] = {}
    for node in sg.nodes:
        for op in (*node.ops, *node.backward):
            for name in op.inputs:
                readers.setdefault(name, set()).add(id(op))
        for hand_over in node.hand_overs:
            readers.setdefault(hand_over.value, set()).add(_USER)
    for name in sg.output_names:
        readers.setdefault(name, set()).add(_USER)
    return readers


def _statistics(op: Op) -> Statistics | None:
    if op.target_name not in BATCH_NORMS or not op.args[5] or not op.writes:
        return None
    mean, variance = op.args[3], op.args[4]
    return Statistics(mean.name, variance.name, float(op.args[6]))


_READING_STATISTICS = {"native_batch_norm": 5, "native_batch_norm_backward": 7}


def _read(op: Op) -> tuple[str, ...]:
    """Return what an operation reads here."""
    return _as_run(op).inputs


def _as_run(op: Op) -> Op:
    """Return a batch norm in training without the running statistics, which decide nothing."""
    place = _READING_STATISTICS.get(op.target_name)
    return op if place is None or not op.args[place] else _without_running(op, 3)


def _without_running(op: Op, place: int) -> Op:
    args = (*op.args[:place], None, None, *op.args[place + 2 :])
    return Op(op.name, op.target, args, op.kwargs, op.results, op.returns_many)


def _run(op: Op, values: dict[str, Tensor], statistics: list[Tensor]) -> None:
    if _statistics(op) is not None:
        made: Any = _batch_norm(op, values, statistics)
    else:
        op = _as_run(op)
        args = map_refs(op.args, values.__getitem__)
        made = op.target(*args, **map_refs(dict(op.kwargs), values.__getitem__))
    if not op.returns_many:
        made = (made,)
    values.update((name, value) for name, value in zip(op.results, made, strict=False) if name)


def _batch_norm(op: Op, values: dict[str, Tensor], statistics: list[Tensor]) -> Any:
    """Run a batch norm that leaves the buffers alone; note what they are to be moved towards.

    From zeros with all the weight on the new, the functional kernel returns mean and variance.
    """
    x, weight, bias = (map_refs(arg, values.__getitem__) for arg in op.args[:3])
    kind = values[op.args[0].name] if weight is None else weight
    zeros = torch.zeros(x.shape[1], dtype=kind.dtype, device=x.device)
    *made, mean, variance = _aten._native_batch_norm_legit_functional.default(
        x, weight, bias, zeros, zeros.clone(), True, 1.0, op.args[7]
    )
    statistics += [mean, variance]
    return made


def reference(names: Sequence[str]) -> tuple[Ref, ...]:
    """Return the values of these names as arguments."""
    return tuple(map(Ref, names))
