"""A part of a step that runs piece by piece, as the target of one operation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rkgb.elements.op import Op, call_op, run_op
from rkgb.elements.target import Target
from rkgb.recording import LiveBytes
from rkgb.rows.cuts import piece_of
from rkgb.rows.memory import into_memory
from rkgb.rows.pieces import SHORT, Pieces

_MM = torch.ops.aten.mm.default


@dataclass(frozen=True)
class Line:
    """One call, and the values whose last use it is."""

    op: Op
    run: Callable[..., Any]
    slices: tuple[str, ...]  # pieces of whole values that are first read here
    frees: tuple[str, ...]
    into: str = ""  # the input, or the whole, in whose memory the result is made


class InPieces(Target):
    """Runs a part of a step piece by piece: a function from its inputs to its results.

    What is donated (`frees`) is freed after its last use. A whole is made in the memory of a
    gradient that is the backward's own.
    """

    is_half = True

    def __init__(
        self,
        pieces: Pieces,
        name: str,
        side: str,
        frees: frozenset[int] = frozenset(),
        own: frozenset[int] = frozenset(),
    ) -> None:
        self.pieces, self.side, self.name, self.frees = pieces, side, name, frees
        self.keeping: InPieces | None = None  # the same call with no donated arguments
        self.recorded, self.rounds = pieces.recorded, pieces.count
        self.__name__ = f"{name}_in_{pieces.count}"
        self.digest = hashlib.sha1(pieces.text.encode()).hexdigest()[:20]
        kept = {*pieces.results}
        donated = {pieces.takes[at] for at in frees}
        outside = {*pieces.takes} - donated
        self.lent: dict[str, str] = {}  # wholes, and the gradients in whose memory they are made
        for whole, sources in pieces.instead.items():
            for source in sources:
                at = pieces.takes.index(source)
                if at in frees and at in own and source not in self.lent.values():
                    self.lent.setdefault(whole, source)
        into = {name: over for name, over in pieces.into.items() if over not in self.lent}
        wholes = {s.source for s in pieces.slices.values()}
        in_loop = {n for op in pieces.loop for n in op.inputs} | wholes
        in_after = {n for op in pieces.after for n in op.inputs}
        sums = {*pieces.summed}
        self.before = _lines(pieces.before, {}, kept | outside | in_loop | in_after)
        made = {n for op in pieces.loop for n in op.results} | {*pieces.slices}
        stay = {n for op in pieces.loop for n in op.inputs} - made
        self.loop = _lines(pieces.loop, pieces.slices, stay | {*pieces.takes}, into)
        self.short = _lines(pieces.short, pieces.slices, stay | {*pieces.takes}, into)
        self.after = _lines(pieces.after, {}, kept | outside)
        begun = {n for op in pieces.before for n in op.results} | donated
        self.done = tuple(sorted((in_loop & begun) - in_after - kept - sums))

    def __repr__(self) -> str:  # the same in every process: a key of recorded costs
        freed = f" frees {sorted(self.frees)}" if self.frees else ""
        places = sorted(map(self.pieces.takes.index, self.lent.values()))
        lent = f" into {places}" if places else ""
        return f"pieces {self.digest} {self.side}{freed}{lent}"

    def freeing(self, places: frozenset[int], own: frozenset[int]) -> InPieces:
        donated = InPieces(self.pieces, self.name, self.side, places, own)
        donated.keeping = self
        return donated

    def flops(self, count: Callable[[Op], int]) -> int:
        return sum(map(count, self.recorded))

    def inner_bytes(self, like: Sequence[Any]) -> int:
        held = LiveBytes((), torch.device("meta"))
        with torch.no_grad(), held:
            self.run(list(like))
        return held.peak_bytes

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (self.keeping or self).run(list(tensors))

    def run(self, boxed: list[Any]) -> tuple[Tensor, ...]:
        pieces = self.pieces
        values: dict[str, Tensor] = dict(zip(pieces.takes, boxed, strict=True))
        boxed.clear()
        _run(self.before, values)
        wholes: dict[str, Tensor] = {n: values[source] for n, source in self.lent.items()}
        for index in range(pieces.count):
            placed: set[str] = set()  # pieces that lie in their whole
            for line in self.short if pieces.runs.is_short(index) else self.loop:
                for name in line.slices:
                    part = pieces.slices[name]
                    values[name] = piece_of(values[part.source], part.cuts, index, pieces.runs)
                if (
                    line.op.target is _MM
                    and line.op.results[0] in wholes
                    and line.op.results[0] in pieces.summed
                    and pieces.infos[line.op.results[0]].dtype not in SHORT
                ):
                    a, b = (values[name] for name in line.op.inputs)
                    whole = wholes[line.op.results[0]]
                    torch.addmm(whole, a, b, out=whole)
                    del a, b
                else:
                    place = self._place(line, values, wholes, index) if line.into else None
                    if place is None:
                        run_op(line.op, values, line.run)
                    else:
                        _run_into(place, line.op, values)
                        if line.into in pieces.gathered or line.into in placed:
                            placed.add(line.op.results[0])
                    for name in line.op.results:
                        if name in pieces.summed:
                            _add(name, values.pop(name), wholes, pieces)
                        elif name in pieces.gathered and name not in placed:
                            _put(name, values[name], wholes, pieces, index)
                for name in line.frees:
                    values.pop(name, None)
        for name in self.done:
            del values[name]
        for name in tuple(wholes):
            info, whole = pieces.infos.get(name), wholes.pop(name)
            values[name] = whole if info is None else whole.to(info.dtype)
        _run(self.after, values)
        return tuple([values[name] for name in pieces.results])

    def _place(
        self, line: Line, values: Mapping[str, Tensor], wholes: dict[str, Tensor], index: int
    ) -> Tensor | None:
        """Return the memory that a result is made in; None where kernels would take another way."""
        name, pieces = line.into, self.pieces
        if name not in pieces.gathered:
            place = values[name]
        else:
            if name not in wholes:
                wholes[name] = _empty(name, pieces, next(iter(values.values())))
            place = piece_of(wholes[name], pieces.gathered[name], index, pieces.runs)
        return place if place.is_contiguous() else None


def _run(lines: Iterable[Line], values: dict[str, Tensor]) -> None:
    for line in lines:
        run_op(line.op, values, line.run)
        for name in line.frees:
            values.pop(name, None)


def _run_into(place: Tensor, op: Op, values: dict[str, Tensor]) -> None:
    kernel, argument = into_memory(op)
    call_op(replace(op, kwargs={**op.kwargs, argument: place}), values, kernel)
    values[op.results[0]] = place


def _lines(
    ops: Sequence[Op], slices: Any, stay: set[str], into: Mapping[str, str] = MappingProxyType({})
) -> tuple[Line, ...]:
    """Return the calls of some operations, each with the values that it frees."""
    used = [dict.fromkeys((*op.inputs, *filter(None, op.results))) for op in ops]
    first = {name: at for at, op in reversed([*enumerate(ops)]) for name in op.inputs}
    last = {name: at for at, names in enumerate(used) for name in names}
    return tuple(
        Line(
            op,
            run=op.kernel,
            slices=tuple(n for n in used[at] if n in slices and first.get(n) == at),
            frees=tuple(n for n in used[at] if last[n] == at and n not in stay),
            into=into.get(op.results[0], "") if op.results else "",
        )
        for at, op in enumerate(ops)
    )


def _add(name: str, term: Tensor, wholes: dict[str, Tensor], pieces: Pieces) -> None:
    whole = wholes.get(name)
    if whole is not None:
        whole.add_(term)
        return
    info = pieces.infos.get(name)
    if info is None or (term.stride() == info.stride and info.dtype not in SHORT):
        wholes[name] = term
    else:
        wholes[name] = _empty(name, pieces, term, sums=True).copy_(term)


def _put(name: str, piece: Tensor, wholes: dict[str, Tensor], pieces: Pieces, index: int) -> None:
    if name not in wholes:
        wholes[name] = _empty(name, pieces, piece)
    piece_of(wholes[name], pieces.gathered[name], index, pieces.runs).copy_(piece)


def _empty(name: str, pieces: Pieces, like: Tensor, *, sums: bool = False) -> Tensor:
    info = pieces.infos[name]
    dtype = torch.float32 if sums and info.dtype in SHORT else info.dtype
    return torch.empty_strided(info.shape, info.stride, dtype=dtype, device=like.device)
