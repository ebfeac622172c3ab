"""Convolutions in parts along channels, before they are cut along rows.

The backward of a convolution is made in parts, the weight's gradient before the input's: then the
input is past its last use. A convolution of a `cat` is one of each tensor in it, with the part of
the weight that belongs to it. So neither the `cat` nor its gradient is ever there, which on the way
up of a U-Net are the largest values:

    convolution(cat([skip, up], 1), w)    convolution(up, w[:, 8:]) + convolution(skip, w[:, :8])
    its backward                          gradients of w[:, :8] and w[:, 8:], of up, of skip

The sum of two forwards is rounded otherwise, so exact pieces keep the forward. A backward in parts
has the bits of the whole where the library adds up in the same order, which is tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rkgb.elements.op import Op, Ref
from rkgb.elements.tensor_info import TensorInfo, contiguous_strides
from rkgb.rows.memory import in_own_memory

_aten = torch.ops.aten
_SLICE = _aten.slice.Tensor
_CHANNELS = 1  # of images, and the inputs of a weight
_MOST_JOINED = 4  # each tensor of a `cat` takes calls of its own
_TRANSPOSED, _GROUPS = -3, -1  # arguments of a convolution

# Tells whether operations in a row have the bits of others.
SameAs = Callable[[Sequence[Op], Sequence[Op]], bool]


@dataclass(frozen=True)
class _Part:
    """A tensor, and where its channels are among the inputs of a weight."""

    name: str
    start: int
    count: int


@dataclass
class Channels:
    """Rewrites convolutions among `ops`, of which others read what is `left`.

    With `same_as` the bits stay.
    """

    ops: Sequence[Op]
    infos: Mapping[str, TensorInfo]
    left: Collection[str]
    same_as: SameAs | None = None
    added: dict[str, TensorInfo] = field(default_factory=dict)  # values that are new
    joined: set[str] = field(default_factory=set)  # tensors of which each has calls of its own

    def __post_init__(self) -> None:
        self._maker = {name: op for op in self.ops for name in op.results if name}

    def in_parts(self) -> Iterator[Op]:
        """Yield the operations, with convolutions in parts."""
        gone: set[str] = set()
        for op in self.ops:
            new: list[Op] = []
            if op.target is _aten.convolution.default and self.same_as is None:
                new = self._forward(op)
            elif op.target is _aten.convolution_backward.default:
                new = self._backward(op)
                gone.update(name for part in new for name in part.results)
            if new or op.target is not _SLICE or op.results[0] not in gone:
                yield from new or (op,)

    def _forward(self, op: Op) -> list[Op]:
        """Return the convolutions of the tensors of a `cat`, and their sum; nothing of another."""
        x, weight, bias, *how = op.args
        parts = self._inner_first(self._joined(x, how))
        found: list[Op] = []
        total = ""
        for at, part in enumerate(parts, 1):
            given = self._given(part, weight, found)
            name = self._new(f"{op.name} of {part.start}", op.results[0])
            found.append(_op(op, (*given, None if total else bias, *how), (name,)))
            if total:
                is_all = at == len(parts)
                both = op.results[0] if is_all else self._new(f"{name} and before", op.results[0])
                found.append(_op(op, (Ref(total), Ref(name)), (both,), _aten.add.Tensor))
                name = both
            total = name
        return found

    def _backward(self, op: Op) -> list[Op]:
        """Return the parts of a backward; nothing if it stays whole."""
        gradient, x, weight, sizes, *how, _ = op.args
        of_input, of_weight, of_bias = op.results
        joined = self._joined(x, how) if of_weight and _is_plain(self.infos[of_weight]) else []
        slices = self._slices(of_input, joined)
        if of_input and not slices:
            joined = []
        parts = joined or [_Part(x.name, 0, self.infos[x.name].shape[_CHANNELS])]
        found: list[Op] = []
        terms: list[str] = []

        def add(part: _Part, results: tuple[str, str, str]) -> None:
            given = self._given(part, weight, found) if joined else (x, weight)
            args = (gradient, *given, sizes, *how, [*map(bool, results)])
            found.append(_op(op, args, results))

        for part in parts if of_weight or of_bias else ():
            name = of_weight
            if joined:
                sizes_of_part = self.infos[of_weight].shape
                shape = (sizes_of_part[0], part.count, *sizes_of_part[2:])
                name = self._new(f"{of_weight} of {part.start}", of_weight, shape)
            add(part, ("", name, "" if terms else of_bias))
            terms.append(name)
        if joined:
            args = ([*map(Ref, terms)], _CHANNELS)
            found.append(_op(op, args, (of_weight,), _aten.cat.default))
        for part in self._inner_first(parts):
            name = slices.get(part, "") if joined else of_input
            if name:
                add(part, (name, "", ""))
        for name in slices.values() if joined else ():
            self._new(name, name)
        if len(found) == 1 or (self.same_as and not self._has_same_bits(op, joined, slices, found)):
            return []
        return found

    def _has_same_bits(
        self, op: Op, joined: Sequence[_Part], slices: Mapping[_Part, str], found: Sequence[Op]
    ) -> bool:
        assert self.same_as is not None
        before = [self._maker[op.args[1].name]] if joined else []
        behind = [self._maker[name] for name in slices.values()]
        return self.same_as([*before, op, *behind], found)

    def _joined(self, x: Any, how: Sequence[Any]) -> list[_Part]:
        """Return the tensors of the `cat` along channels that makes an input, or nothing."""
        maker = self._maker.get(x.name)
        if maker is None or maker.target is not _aten.cat.default or x.name in self.left:
            return []
        refs, *dims = maker.args
        if how[_TRANSPOSED] or how[_GROUPS] > 1 or not 1 < len(refs) <= _MOST_JOINED:
            return []
        if dims != [_CHANNELS]:
            return []
        counts = [self.infos[ref.name].shape[_CHANNELS] for ref in refs]
        starts = itertools.accumulate(counts, initial=0)
        self.joined.update(ref.name for ref in refs)
        return [
            _Part(ref.name, start, count)
            for ref, start, count in zip(refs, starts, counts, strict=False)
        ]

    def _inner_first(self, parts: Sequence[_Part]) -> list[_Part]:
        """Return parts in the order in which they run.

        What is made here is freed before others are read; the gradient of what comes from outside
        may lie over the gradient that all parts read.
        """
        return sorted(parts, key=lambda part: part.name not in self._maker)

    def _slices(self, gradient: str, joined: Sequence[_Part]) -> dict[_Part, str]:
        """Return the slices of a gradient that go to these parts; nothing if others read it."""
        places = {(_CHANNELS, part.start, part.start + part.count): part for part in joined}
        found: dict[_Part, str] = {}
        for op in self.ops if gradient not in self.left else ():
            if gradient in op.inputs:
                part = places.get(op.args[1:]) if op.target is _SLICE else None
                if part is None:
                    return {}
                found[part] = op.results[0]
        return found

    def _given(self, part: _Part, weight: Ref, found: list[Op]) -> tuple[Ref, Ref]:
        """Return a tensor with the view of a weight that belongs to it, and add what makes it."""
        info, stop = self.infos[weight.name], part.start + part.count
        view = f"{weight.name} from {part.start} to {stop}"
        shape = (info.shape[0], part.count, *info.shape[2:])
        size = math.prod(shape) * info.dtype.itemsize
        offset = info.offset + part.start * info.stride[_CHANNELS]
        self.added[view] = replace(info, shape=shape, size_bytes=size, offset=offset)
        args = (weight, _CHANNELS, part.start, stop)
        found.append(Op(name=view, target=_SLICE, args=args, kwargs={}, results=(view,)))
        return Ref(part.name), Ref(view)

    def _new(self, name: str, like: str, shape: Sequence[int] | None = None) -> str:
        """Add a value in memory of its own."""
        info = self.infos[like]
        whole = replace(info, shape=tuple(shape or info.shape))
        size = math.prod(whole.shape) * info.dtype.itemsize
        self.added[name] = in_own_memory(name, replace(whole, size_bytes=size))
        return name


def _op(like: Op, args: tuple[Any, ...], results: tuple[str, ...], target: Any = None) -> Op:
    """Return an operation in the place of another."""
    name = next(filter(None, results))
    new = replace(like, name=name, args=args, results=results)
    return new if target is None else replace(new, target=target, returns_many=False)


def _is_plain(info: TensorInfo) -> bool:
    """Return whether a value is laid out as a `cat` of others is."""
    return info.stride == contiguous_strides(info.shape)
