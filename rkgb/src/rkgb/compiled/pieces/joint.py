"""What one piece computes: forward and backward, as one function of its inputs.

primals   inputs of its forward: values of other nodes, and resident ones
tangents  further inputs of its backward: gradients, and values of other nodes
results   values of its forward that other nodes read, then statistics of batch norms
gradients values of its backward that other nodes read or that autograd gets
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rkgb.compiled.pieces.formulas import formula_of, suits
from rkgb.compiled.pieces.grouping import is_effect
from rkgb.elements.op import BATCH_NORMS, Op, map_refs, run_op
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.simplified import SimplifiedGraph

_aten = torch.ops.aten


@dataclass(frozen=True)
class Statistics:
    """Running statistics that a batch norm of the forward updates: buffers and momentum."""

    mean: str
    variance: str
    momentum: float


@dataclass(frozen=True)
class Joint:
    """The recorded operations of a piece, with its inputs and outputs."""

    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    primals: tuple[str, ...]
    tangents: tuple[str, ...]
    results: tuple[str, ...]
    gradients: tuple[str, ...]
    statistics: tuple[Statistics, ...]
    effects: tuple[Op, ...]  # updates of counters, which stay operations of their own
    static: frozenset[str]  # the resident primals
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
        # The layout of saved tensors is known only after the forward is compiled.
        always = any(op.target_name == "convolution_backward" for op in self.backward)
        gradients = (self._laid(values[name], name, always=always) for name in self.gradients)
        return [*made, *found, *gradients]

    def _laid(self, value: Tensor, name: str, *, always: bool = False) -> Tensor:
        """Return an image in its layout in `infos`; with `always` even if it has that layout."""
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
        """Inputs and outputs that share their memory with no other one."""
        names = (*self.primals, *self.tangents, *self.results, *self.gradients)
        counts = Counter(self.infos[name].alias_of for name in names)
        return frozenset(name for name in names if counts[self.infos[name].alias_of] == 1)

    @property
    def reads_what_it_updates(self) -> bool:
        """Whether it reads a buffer that it also updates: the update would run after the piece."""
        infos = self.infos
        moved = {name for s in self.statistics for name in (s.mean, s.variance)}
        moved |= {name for op in self.effects for name in op.writes}
        roots = {infos[name].alias_of for name in moved}
        return any(infos[name].alias_of in roots for name in (*self.primals, *self.tangents))

    @property
    def key(self) -> str:
        """A text that is equal for two pieces exactly if one compilation serves both."""
        infos = map(self.infos.__getitem__, self._numbered)
        lying = [(info.offset, info.storage_bytes) for info in infos]
        return f"{self.form}\n{self.numbers}\n{lying}"

    @cached_property
    def form(self) -> str:
        """A text that is equal for two pieces that differ only in sizes and integer arguments."""
        places = self._numbered
        lines: list[str] = []
        for name, place in places.items():
            info = self.infos[name]
            root = "own" if info.alias_of == name else str(places[info.alias_of])
            kept = "static " if name in self.static else ""
            kept += "written" if info.alias_of in self.written else ""
            lines.append(f"{place}: {kept}{info.dtype} {len(info.shape)} {root}")

        def text(tree: Any) -> str:
            named = map_refs(tree, lambda name: _Shown(f"#{places[name]}"))
            return repr(_with_integers(named, itertools.repeat(_Shown("?"))))

        for op in (*self.forward, *self.backward):
            made = ", ".join(f"#{places[name]}" if name else "_" for name in op.results)
            lines.append(f"{made} = {op.target}({text(op.args)}, {text(dict(op.kwargs))})")
        for names in (self.primals, self.tangents, self.results, self.gradients):
            lines.append(", ".join(f"#{places[name]}" for name in names))
        return "\n".join(lines)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Shapes and strides of its values, and the integers among arguments."""
        found: list[int] = []
        for name in self._numbered:
            found += (*self.infos[name].shape, *self.infos[name].stride)
        for op in (*self.forward, *self.backward):
            _with_integers((op.args, dict(op.kwargs)), itertools.repeat(0), found)
        return tuple(found)

    def with_numbers(self, numbers: Iterable[Any]) -> Joint:
        """Return the same piece with other numbers, which may be symbols."""
        given = iter(numbers)
        infos = dict(self.infos)
        for name in self._numbered:
            shape, stride = (
                tuple(itertools.islice(given, len(sizes)))
                for sizes in (infos[name].shape, infos[name].stride)
            )
            infos[name] = replace(infos[name], shape=shape, stride=stride)
        halves = []
        for ops in (self.forward, self.backward):
            changed = []
            for op in ops:
                args, kwargs = _with_integers((op.args, dict(op.kwargs)), given)
                changed.append(replace(op, args=args, kwargs=kwargs))
            halves.append(tuple(changed))
        return replace(self, forward=halves[0], backward=halves[1], infos=infos)

    @cached_property
    def _numbered(self) -> dict[str, int]:
        """All values, and the makers of their storages, numbered in order of appearance."""
        found: dict[str, int] = {}
        ops = (*self.forward, *self.backward)
        of_ops = (name for op in ops for name in (*op.results, *op.inputs) if name)
        for name in (*self.primals, *self.tangents, *of_ops, *self.results, *self.gradients):
            for each in (name, self.infos[name].alias_of):
                found.setdefault(each, len(found))
        return found

    @cached_property
    def digest(self) -> str:
        """A short name of the class, the same in every process."""
        return hashlib.sha1(self.key.encode()).hexdigest()[:10]


@dataclass(frozen=True)
class _Shown:
    text: str

    def __repr__(self) -> str:
        return self.text


def _with_integers(tree: Any, given: Iterator[Any], found: list[int] | None = None) -> Any:
    """Replace each integer in arguments by the next of `given`, and append it to `found`."""
    kind = type(tree)
    if kind is int:
        if found is not None:
            found.append(tree)
        return next(given)
    if kind in (tuple, list):
        return kind([_with_integers(value, given, found) for value in tree])
    if kind is dict:
        return {key: _with_integers(value, given, found) for key, value in tree.items()}
    return tree


def joint_of(sg: SimplifiedGraph, index: int) -> Joint:
    """Return what node `index` of `sg` computes."""
    node, infos = sg.nodes[index], sg.infos
    effects = tuple(op for op in node.ops if is_effect(op, sg))
    forward = tuple(op for op in node.ops if op not in effects)
    made = {name for op in forward for name in op.results if name}
    primals = dict.fromkeys(n for op in forward for n in _read(op) if n not in made)
    made_behind = {name for op in node.backward for name in op.results if name}
    behind = (n for op in node.backward for n in _read(op))
    tangents = (n for n in behind if n not in made and n not in made_behind and n not in primals)
    own = [name for op in forward for name in op.results if name]
    gradients = [name for op in node.backward for name in op.results if name]
    basic = sg.basic
    resident = {*basic.parameters, *basic.buffers, *basic.constants}

    def is_read_outside(name: str) -> bool:
        ahead, behind = sg.uses.readers.get(name, ()), sg.uses_behind.readers.get(name, ())
        taken = (index, len(node.backward))
        others = any(at.part != index for at in (*ahead, *behind))
        return others or taken in behind or name in sg.output_names

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
        written=_written(sg, index),
    )


def _written(sg: SimplifiedGraph, index: int) -> frozenset[str]:
    """Return the storages that other nodes write to or that the user may write to."""
    infos = sg.infos
    roots = Counter(infos[name].alias_of for name in sg.output_names)
    outside = sg.basic.externals
    shared = (root for root, count in roots.items() if count > 1 or root in outside)
    writes = (*sg.uses.writes.items(), *sg.uses_behind.writes.items())
    others = (root for root, found in writes if any(at.part != index for at in found))
    return frozenset((*shared, *others))


def _statistics(op: Op) -> Statistics | None:
    if op.target_name not in BATCH_NORMS or not op.args[5] or not op.writes:
        return None
    mean, variance = op.args[3], op.args[4]
    return Statistics(mean.name, variance.name, float(op.args[6]))


_READING_STATISTICS = {"native_batch_norm": 5, "native_batch_norm_backward": 7}


def _read(op: Op) -> tuple[str, ...]:
    """Return the inputs of an operation as it runs in a piece."""
    return _as_run(op).inputs


def _as_run(op: Op) -> Op:
    """Return a batch norm in training without the running statistics, which it does not use."""
    place = _READING_STATISTICS.get(op.target_name)
    if place is None or not op.args[place]:
        return op
    args = (*op.args[:3], None, None, *op.args[5:])
    return Op(op.name, op.target, args, op.kwargs, op.results, op.returns_many)


def _run(op: Op, values: dict[str, Tensor], statistics: list[Tensor]) -> None:
    if _statistics(op) is not None:
        made = _batch_norm(op, values, statistics)
        values.update((name, value) for name, value in zip(op.results, made, strict=False) if name)
        return
    op = _as_run(op)
    fits = suits(map_refs(op.args, values.__getitem__))
    run_op(op, values, formula_of(op) if fits else None)


def _batch_norm(op: Op, values: dict[str, Tensor], statistics: list[Tensor]) -> Any:
    """Run a batch norm without writing to its buffers; add the batch's statistics to `statistics`.

    With buffers of zeros and momentum 1 the functional kernel returns mean and variance.
    """
    x, weight, bias = (map_refs(arg, values.__getitem__) for arg in op.args[:3])
    kind = values[op.args[0].name] if weight is None else weight
    zeros = torch.zeros(x.shape[1], dtype=kind.dtype, device=x.device)
    *made, mean, variance = _aten._native_batch_norm_legit_functional.default(
        x, weight, bias, zeros, zeros.clone(), True, 1.0, op.args[7]
    )
    statistics += [mean, variance]
    return made
