"""Recorded operations laid out to run piece by piece.

    before   operations that depend on no piece: transposed views of weights, expanded gradients
    loop     runs for each piece, on pieces of the inputs and of results of the loop
    after    operations that depend on sums over all pieces

Where rows do not divide, the loop's last piece, or each k-th, runs operations for fewer rows.
A value that is not cut exists as a whole, and the loop may read any piece of it. The loop makes
pieces and terms of sums. Nothing in the loop reads a sum.

If the bits must be those of the whole, some operations run after the loop, on whole values into
which the loop has written its pieces: sums over rows, and kernels whose method depends on the
number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from rkgb.elements.op import Op, Ref, map_refs
from rkgb.elements.tensor_info import TensorInfo
from rkgb.errors import NotByPiecesError
from rkgb.rows.cuts import EVEN, Cuts, Runs, Slice
from rkgb.rows.find import find
from rkgb.rows.losses import of_rows
from rkgb.rows.memory import lent, lying
from rkgb.rows.rules import Asked, Found, Value
from rkgb.rows.same_bits import BitsOfPieces

_aten = torch.ops.aten
_SUMMED = (torch.float32, torch.float64)
SHORT = (torch.bfloat16, torch.float16)  # added up in float32: not rounded at each piece


@dataclass(frozen=True)
class Pieces:
    """Operations to be run in `count` pieces."""

    count: int
    takes: tuple[str, ...]  # values that come from outside
    before: tuple[Op, ...]
    loop: tuple[Op, ...]
    short: tuple[Op, ...]  # the loop of shorter pieces
    runs: Runs
    slices: Mapping[str, Slice]  # by name in the loop
    after: tuple[Op, ...]
    gathered: Mapping[str, Cuts]  # results of the loop whose pieces are written into a whole
    summed: tuple[str, ...]
    results: tuple[str, ...]
    infos: Mapping[str, TensorInfo]  # of results, gathered and summed values
    recorded: tuple[Op, ...]  # the operations that these replace
    into: Mapping[str, str] = field(default_factory=dict)  # results of the loop, and where they lie
    # Wholes, each with what comes from outside and may lend its memory.
    instead: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def text(self) -> str:
        """A text that is equal exactly for pieces that do the same."""
        numbers: dict[str, int] = {}

        def number(name: str) -> str:
            return f"#{numbers.setdefault(name, len(numbers))}" if name else "_"

        lines = [f"{self.count} pieces of {', '.join(map(number, self.takes))} in {self.runs}"]
        for part in (self.before, self.loop, self.short, self.after):
            for op in part:
                options = map_refs(dict(op.kwargs), number)
                made = ", ".join(map(number, op.results))
                lines.append(f"{made} = {op.target}{map_refs(op.args, number)!r} {options!r}")
            lines.append("")
        lines += [f"{number(n)} = {number(s.source)} {s.cuts}" for n, s in self.slices.items()]
        lines += [f"{number(n)} lies in {number(over)}" for n, over in self.into.items()]
        for name in dict.fromkeys((*self.results, *self.gathered)):
            info = self.infos[name]
            how = self.gathered.get(name, "sum" if name in self.summed else "whole")
            lines.append(f"{number(name)} {how} {info.shape} {info.stride} {info.dtype}")
        return "\n".join(lines)


@dataclass
class Cutting:
    """Distributes operations, one after the other, over before, loop and after."""

    infos: Mapping[str, TensorInfo]
    count: int
    seeds: Mapping[str, Cuts]  # inputs that are cut to begin with
    runs: Runs = EVEN
    same_bits: BitsOfPieces | None = None  # if bits must be those of the whole
    # Results that are inputs although an operation here makes them: sums over all pieces.
    known: Set[str] = frozenset()
    joined: Set[str] = frozenset()  # inputs that are cut like the others of a `cat`
    is_compiled: bool = False  # what is between products of the loop, later
    cut: dict[str, Cuts] = field(default_factory=dict)  # results of the loop
    late: set[str] = field(default_factory=set)  # sums, and values that depend on them
    summed: set[str] = field(default_factory=set)
    before: list[Op] = field(default_factory=list)
    loop: list[Op] = field(default_factory=list)
    short: list[Op] = field(default_factory=list)  # the same, for shorter pieces
    after: list[Op] = field(default_factory=list)
    slices: dict[str, Slice] = field(default_factory=dict)
    added: list[Op] = field(default_factory=list)
    overwritten: set[str] = field(default_factory=set)  # values that a write has replaced

    def add(self, op: Op) -> None:
        """Add an operation to before, loop or after.

        Raises:
            NotByPiecesError: it cannot run on pieces of its inputs.
        """
        before: list[str] = []
        if op.writes:
            op, before = self._out_of_place(op)
        if op.is_random or op.flags or getattr(op.target, "namespace", "") != "aten":
            raise NotByPiecesError(f"{op.target_name} draws, or is none of torch's own")
        if not self.overwritten.isdisjoint(op.inputs):
            raise NotByPiecesError(f"{op.target_name} reads memory by a name from before a write")
        self.overwritten.update(before)
        self.added.append(op)
        if not self.known.isdisjoint(op.results):  # it exists already
            op = replace(op, results=tuple("" if n in self.known else n for n in op.results))
        if not any(op.results):
            return
        if any(self._cuts_of(name) is not None for name in op.inputs):
            self._add_to_loop(op)
        elif any(self._is_late(name) for name in op.inputs):
            self._add_after(op)
        else:
            self.before.append(op)

    def _out_of_place(self, op: Op) -> tuple[Op, list[str]]:
        """Return an elementwise write into what an operation here has made, as a new result.

        Nothing may read that memory by one of the older names, which are returned, too.

        Raises:
            NotByPiecesError: it writes to something else, or has no such form.
        """
        name, target, infos = op.target_name, op.target, self.infos
        given = op.args[0].name if op.args and isinstance(op.args[0], Ref) else ""
        overload = getattr(target, "_overloadname", "default")
        other = getattr(getattr(_aten, name.removesuffix("_"), None), overload, None)
        root = infos[given].alias_of if given else ""
        same = [n for op in self.added for n in op.results if n and infos[n].alias_of == root]
        is_own = given in self.cut and root in same and op.writes == (given,)
        types = {infos[n].dtype for n in op.inputs if infos[n].shape} - {torch.bool}
        is_whole = given and infos[given].size_bytes == infos[root].storage_bytes
        if other is None or not is_own or len(types) != 1 or not is_whole:
            raise NotByPiecesError(f"{name} writes to memory from elsewhere, or to a part of it")
        return replace(op, target=other, writes=()), same

    def _cuts_of(self, name: str) -> Cuts | None:
        if name in self.known:
            return None
        return self.cut.get(name) or self.seeds.get(name)

    def _is_late(self, name: str) -> bool:
        return name in self.late and name not in self.known

    def _add_after(self, op: Op) -> None:
        self.after.append(op)
        self.late.update(filter(None, op.results))

    def _add_on_wholes(self, op: Op) -> None:
        """Add an operation after the loop, on whole values."""
        wholes = {name: self._whole(name) for name in op.inputs}
        self._add_after(replace(op, args=map_refs(op.args, lambda name: Ref(wholes[name]))))

    def _add_summed(self, op: Op) -> None:
        """Add an operation whose result is a sum over all rows, made after the loop."""
        there = of_rows(op, self.infos)
        if there is None:
            return self._add_on_wholes(op)
        first, summed, facts = there
        self.infos = {**self.infos, first.name: facts}
        self._add_to_loop(first)
        for after in summed:
            self._add_on_wholes(after)
        return None

    def _whole(self, name: str) -> str:
        """Return the whole value into which the pieces of a value are written, or a view of it."""
        if name not in self.cut or name in self.known:
            return name
        if self.infos[name].alias_of == name:
            return name
        seen = f"{name} as a whole"
        if seen not in self.late:
            view = next(op for op in self.added if name in op.results)
            results = tuple(f"{n} as a whole" if n else n for n in view.results)
            self._add_on_wholes(replace(view, results=results))
        return seen

    def _add_to_loop(self, op: Op) -> None:
        def value(tree: Any) -> Any:
            if not isinstance(tree, Ref):
                return tree
            return Value(self.infos[tree.name].shape, self._cuts_of(tree.name))

        recorded = op
        listed = len(op.args[0]) if isinstance(op.args[0], (list, tuple)) else 0
        if listed:  # for rules, the tensors of a list are separate arguments
            op = replace(op, args=(*op.args[0], *op.args[1:]))
        flat = [arg.name for arg in op.args if isinstance(arg, Ref)]
        late = [name for name in op.inputs if self._is_late(name)]
        if late and self.same_bits is not None:
            return self._add_on_wholes(recorded)
        if tuple(flat) != op.inputs or late:
            why = f"reads {late[0]}, a sum over all pieces" if late else "takes tensors by keyword"
            raise NotByPiecesError(f"{op.target_name} {why}")
        made = tuple(self.infos[name].shape if name else () for name in op.results)
        asked = Asked(op, [value(arg) for arg in op.args], made, self.count, self.runs)
        found = find(asked)
        if found is None:
            given = [self._cuts_of(name) for name in op.inputs]
            raise NotByPiecesError(f"no rule for {op.target_name} of pieces {given}")
        if self.same_bits is not None and any(
            name and own is None for name, own in zip(op.results, found.results, strict=True)
        ):
            return self._add_summed(recorded)
        for place, cuts in found.reads.items() if listed else ():
            if op.args[place].name in self.joined:
                self.seeds = {op.args[place].name: cuts, **self.seeds}
        run = self._on_pieces(found, op, listed)
        last = found if self.runs == EVEN else find(replace(asked, index=self.runs.parts - 1))
        assert last is not None
        short = self._on_pieces(last, op, listed)
        if self.same_bits is not None:
            read = {
                name: self.slices.get(name, Slice(name, self._cuts_of(name) or ()))
                for name in run.inputs
            }
            each = [short if self.runs.is_short(i) else run for i in range(self.count)]
            if not self.same_bits(recorded, each, read, found.results, self.runs, self.infos):
                return self._add_on_wholes(recorded)
        self.loop.append(run)
        self.short.append(short)
        for name, known_as, own in zip(run.results, op.results, found.results, strict=True):
            if not name or not known_as:
                continue
            if own is not None:
                self.cut[name] = own
                continue
            dtype = self.infos[known_as].dtype
            if dtype not in _SUMMED and (found.after or dtype not in SHORT):
                raise NotByPiecesError(f"{op.target_name} makes a sum of {dtype}")
            self.summed.add(name)
            self.late.add(name)
        for late_op in found.after:
            self._add_after(late_op)
        return None

    def _on_pieces(self, found: Found, op: Op, listed: int) -> Op:
        """Return the operation that reads pieces."""
        run = found.op or op
        args = [
            Ref(self._piece(arg.name, found.reads.get(place))) if isinstance(arg, Ref) else arg
            for place, arg in enumerate(run.args)
        ]
        if listed:
            args = [args[:listed], *args[listed:]]
        return replace(run, args=tuple(args))

    def _piece(self, name: str, cuts: Cuts | None) -> str:
        """Return the name that the loop reads: a piece of its own, a slice, or a whole value."""
        if (
            cuts is None
            or max(cuts, default=1) == 1
            or (name in self.cut and name not in self.known)
        ):
            return name
        piece = f"{name} in {'x'.join(map(str, cuts))}"
        self.slices[piece] = Slice(name, cuts)
        return piece

    def pieces(self, results: Sequence[str]) -> Pieces:
        """Return the pieces that make these results, and nothing else.

        Raises:
            NotByPiecesError: a result has no memory of its own.
        """
        needed = set(results)
        after = _needed(self.after, needed, self.slices)
        gathered = {name for name in needed if name in self.cut}
        for name in {*results, *gathered}:
            info = self.infos[name]
            own = info.alias_of == name and info.is_dense and not info.offset
            if not own or info.storage_bytes != info.size_bytes:
                raise NotByPiecesError(f"{name} does not lie in memory of its own")
        loop, before = (_needed(part, needed, self.slices) for part in (self.loop, self.before))
        short = () if self.runs == EVEN else _needed(self.short, needed, self.slices)
        if self.is_compiled:
            from rkgb.compiled import products_first

            loop, short = products_first(loop), products_first(short)
        used = {name for op in loop for name in op.inputs}
        slices = {name: s for name, s in self.slices.items() if name in used}
        made = {name for part in (before, loop, after) for op in part for name in op.results}
        read = [name for part in (before, loop, after) for op in part for name in op.inputs]
        read = [slices[name].source if name in slices else name for name in read]
        takes = tuple(dict.fromkeys(name for name in read if name not in made))
        summed = tuple(name for op in loop for name in op.results if name in self.summed)
        if not takes or not results:
            raise NotByPiecesError("nothing is computed in pieces")
        for name in results:
            if name not in made:
                raise NotByPiecesError(f"nothing makes {name}")
        kept = (*results, *summed, *gathered)
        infos = {name: self.infos[name] for name in kept if name in self.infos}
        put = {name: self.cut[name] for name in sorted(gathered)}
        sources = {name: (s.source, s.cuts) for name, s in slices.items()}
        return Pieces(
            *(self.count, takes, before, loop, short, self.runs, slices, after),
            *(put, summed, tuple(results), infos, ()),
            into=lying(loop, self.infos, put, summed),
            instead=lent(loop, (*before, *after), self.infos, put, sources),
        )


def _needed(ops: Sequence[Op], needed: set[str], slices: Mapping[str, Slice]) -> tuple[Op, ...]:
    """Return the operations that `needed` values depend on, and add the inputs of these."""
    kept = []
    for op in reversed(ops):
        if not needed.isdisjoint(op.results):
            kept.append(op)
            needed.update(slices[n].source if n in slices else n for n in op.inputs)
    return tuple(reversed(kept))
