"""The uses of values and of their storages: makers, readers and writers, in order.

This is the only place for last uses, hazards and dead code. A storage has the name of the value
that made it (`TensorInfo.alias_of`). An operation reads its arguments, makes the storages named
after its results, and writes to what it overwrites. A view makes no storage.

uses = Uses([Part(0, ops, outputs)], infos)
uses.last["addmm"]             # At(part=0, place=4): nothing touches that memory afterwards
[at.part for at in uses.reads["addmm"]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rkgb.elements.op import Op
from rkgb.elements.tensor_info import TensorInfo

Infos = Mapping[str, TensorInfo]


def roots_of(infos: Infos, names: Iterable[str]) -> set[str]:
    """Return the storages of values; names '' are skipped."""
    return {infos[name].alias_of for name in names if name}


def made_by(infos: Infos, op: Op) -> list[str]:
    """Return the storages that an operation makes."""
    return [name for name in op.results if name and infos[name].alias_of == name]


class At(NamedTuple):
    """The position of a use: its part, and its place in the part."""

    part: int
    place: int


@dataclass(frozen=True, slots=True)
class Part:
    """Operations that run one after another, and values that are taken at their end."""

    index: int
    ops: Sequence[Op]
    taken: Sequence[str] = ()


@dataclass(frozen=True)
class Uses:
    """The uses in parts that run in this order.

    Values and storages that are not used here have no entry. Taking a value is a read at the place
    after the last operation of its part.
    """

    parts: Sequence[Part]
    infos: Infos

    @cached_property
    def maker(self) -> Mapping[str, int]:
        """The part that makes each value."""
        return {n: part.index for part in self.parts for op in part.ops for n in op.results if n}

    @cached_property
    def readers(self) -> Mapping[str, Sequence[At]]:
        """The reads of each value; an operation counts once."""
        return _table((name, at) for at, read, _ in self._steps for name in read)

    @cached_property
    def reads(self) -> Mapping[str, Sequence[At]]:
        """The reads of each storage; an operation counts once."""
        infos = self.infos
        return _table((infos[n].alias_of, at) for at, read, _ in self._steps for n in read)

    @cached_property
    def writes(self) -> Mapping[str, Sequence[At]]:
        """The writes to each storage, without its making."""
        written = ((at, () if op is None else op.writes) for at, _, op in self._steps)
        return _table((self.infos[name].alias_of, at) for at, names in written for name in names)

    @cached_property
    def last(self) -> Mapping[str, At]:
        """The last use of each storage. Making or reading a view of it is a use."""
        found: dict[str, At] = {}
        for at, read, op in self._steps:
            for name in (*read, *op.writes, *op.results) if op is not None else read:
                if name:
                    found[self.infos[name].alias_of] = at
        return found

    def parts_reading(self, root: str) -> dict[int, None]:
        """Return the parts that read a storage, in the order in which they run."""
        return dict.fromkeys([at.part for at in self.reads.get(root, ())])

    @cached_property
    def _steps(self) -> Sequence[tuple[At, Sequence[str], Op | None]]:
        """(position, values read there, operation); the operation is None for taken values."""
        found: list[tuple[At, Sequence[str], Op | None]] = []
        for part in self.parts:
            found += [(At(part.index, i), op.inputs, op) for i, op in enumerate(part.ops)]
            found.append((At(part.index, len(part.ops)), part.taken, None))
        return found


def _table(pairs: Iterable[tuple[str, At]]) -> dict[str, list[At]]:
    found: dict[str, list[At]] = {}
    for key, at in pairs:
        known = found.setdefault(key, [])
        if not known or known[-1] is not at:
            known.append(at)
    return found


class Before(NamedTuple):
    """Places of operations that must run before an operation: makers of its inputs, and hazards.

    Hazards (`order`) are earlier writers of memory that it touches, earlier users of memory that it
    writes to, and the random operation before it.
    """

    data: set[int]
    order: set[int]


def before_each(infos: Infos, ops: Sequence[Op]) -> list[Before]:
    """Return what must run before each of `ops`, so that reordering does not change results."""
    maker: dict[str, int] = {}
    touched: dict[str, list[int]] = {}  # storage -> its last writer and its users since then
    last_write: dict[str, int] = {}
    last_random: list[int] = []
    found = []
    for index, op in enumerate(ops):
        data = {maker[name] for name in op.inputs if name in maker}
        written = roots_of(infos, op.writes)
        roots = roots_of(infos, (*op.inputs, *op.results)) | written
        order = {last_write[root] for root in roots if root in last_write}
        for root in written:
            order.update(touched.get(root, ()))
            last_write[root] = index
            touched[root] = []
        if op.is_random:
            order.update(last_random)
            last_random = [index]
        for root in roots:
            touched.setdefault(root, []).append(index)
        maker.update((name, index) for name in op.results if name)
        found.append(Before(data, order - data))
    return found


def live_ops(
    infos: Infos, ops: Sequence[Op], needed: Iterable[str], stays: Callable[[Op], bool]
) -> list[int]:
    """Return the places of live operations: those on which `needed` values depend.

    Writes to storages that are read later are live too, and operations for which `stays` is true.
    """
    names = set(needed)
    roots = roots_of(infos, names)
    kept = []
    for index in reversed(range(len(ops))):
        op = ops[index]
        if (
            not names.isdisjoint(op.results)
            or not roots.isdisjoint(infos[name].alias_of for name in op.writes)
            or stays(op)
        ):
            kept.append(index)
            names.update(op.inputs)
            roots |= roots_of(infos, op.inputs)
    return kept[::-1]
