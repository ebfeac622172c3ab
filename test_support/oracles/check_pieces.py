"""Check a call that runs piece by piece, without running it: what it reads, adds up and frees.

Values are followed by name. Each is a whole one or a piece with its number; a sum, or a whole that
pieces are written into, is there when every piece has come exactly once. Memory is followed, too:
what is written over must be past its last use. Nothing here is shared with what lays out or runs
pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rkgb.errors import InvalidGraphError
from rkgb.rows.call import InPieces, Line

_WHOLE = -1


def check_pieces(call: InPieces) -> None:
    """Check that a call makes its results from all pieces, and holds nothing for longer.

    Raises:
        InvalidGraphError: it does not; what is wrong first is named.
    """
    _Check(call).run()


def _may_be_view(line: Line) -> bool:
    schema = getattr(line.op.target, "_schema", None)
    return schema is None or any(made.alias_info for made in schema.returns)


class _Check:
    def __init__(self, call: InPieces) -> None:
        self.call, self.pieces = call, (pieces := call.pieces)
        self.there = dict.fromkeys(call.pieces.takes, _WHOLE)  # value -> the piece it is
        self.come: dict[str, list[int]] = {n: [] for n in self.pieces.summed}  # pieces so far
        self.come |= {n: [] for n in self.pieces.gathered}
        self.memory: dict[str, str] = {}  # value -> the one, or the whole, in whose memory it lies
        self.gone: set[str] = set()  # values of this piece whose memory has been written over
        self.donated = {pieces.takes[at] for at in call.frees}
        self.where = "the beginning"

    def run(self) -> None:
        call, pieces, runs = self.call, self.pieces, self.pieces.runs
        for name, cuts in self._cuts():
            self._expect(math.prod(cuts) == pieces.count, f"'{name}' is cut in {cuts}")
        self._lines("before the pieces", call.before, _WHOLE)
        for index in range(pieces.count):
            is_short = runs.parts > 1 and (index + 1) % runs.parts == 0
            self._lines(f"piece {index}", call.short if is_short else call.loop, index)
            left = [n for n, piece in self.there.items() if piece != _WHOLE]
            self._expect(not left, f"{', '.join(left)} is still there")
            self.gone.clear()
        self.where = "the end of the pieces"
        self._free(call.done)
        for name, come in self.come.items():
            self._expect(come == [*range(pieces.count)], f"'{name}' has pieces {come}")
            self.there[name] = _WHOLE
        self._lines("after the pieces", call.after, _WHOLE)
        self.where = "the end"
        for name in pieces.results:
            self._expect(self.there.get(name) == _WHOLE, f"'{name}' is not there")
        outside = {*pieces.takes} - self.donated
        left = sorted(self.there.keys() - {*pieces.results} - outside)
        self._expect(not left, f"{', '.join(left)} is still there")

    def _cuts(self) -> Iterable[tuple[str, Sequence[int]]]:
        yield from self.pieces.gathered.items()
        yield from ((name, part.cuts) for name, part in self.pieces.slices.items())

    def _expect(self, fact: bool, otherwise: str) -> None:
        if not fact:
            raise InvalidGraphError(f"wrong pieces at {self.where}: {otherwise}.")

    def _lines(self, where: str, lines: Sequence[Line], index: int) -> None:
        for line in lines:
            self.where = f"{line.op.target_name} of {where}"
            for name in line.slices:
                source = self.pieces.slices[name].source
                self._expect(self.there.get(source) == _WHOLE, f"'{source}' is not there")
                self.there[name] = index
                self.memory[name] = source
            for name in line.op.inputs:
                found = self.there.get(name)
                self._expect(name not in self.gone, f"'{name}' has been written over")
                self._expect(found in (_WHOLE, index), f"'{name}' is {self._words(found)}")
            if line.into:
                self._written(line, index)
            elif _may_be_view(line):
                self.memory[line.op.name] = self._lies_in(line.op.inputs[0])
            for name in filter(None, line.op.results):
                if name in self.call.lent and index != _WHOLE:
                    self._over(self.call.lent[name], ())
                self._expect(name not in self.there, f"'{name}' is there already")
                if name in self.come and index != _WHOLE:
                    self.come[name].append(index)
                if name not in self.pieces.summed or index == _WHOLE:
                    self.there[name] = index
            self._free(n for n in line.frees if n not in self.pieces.summed or index == _WHOLE)

    def _free(self, names: Iterable[str]) -> None:
        for name in names:
            self._expect(name in self.there, f"'{name}' is freed, and is not there")
            is_own = name not in self.pieces.takes or name in self.donated
            self._expect(is_own, f"'{name}' is not its own to free")
            del self.there[name]
            self.memory.pop(name, None)

    def _lies_in(self, name: str) -> str:
        return self.memory.get(name, name)

    def _written(self, line: Line, index: int) -> None:
        """Follow a result into the memory of an input that it frees, or into its whole."""
        name, (result, *_) = line.into, line.op.results
        self._expect(self.there.get(name) != _WHOLE, f"'{name}' is no piece")
        if name not in self.pieces.gathered:
            is_first = line.op.inputs[:1] == (name,) and line.op.inputs.count(name) == 1
            self._expect(is_first, f"'{name}' is read while it is written over")
            self._expect(name not in self.pieces.takes and name in line.frees, f"'{name}' stays")
        self._over(self._lies_in(name), line.frees)
        self.memory[result] = self._lies_in(name)

    def _over(self, memory: str, frees: Sequence[str]) -> None:
        here = {n for n in self.there if self._lies_in(n) == memory and n not in frees}
        self.gone |= {n for n in here if self.there[n] != _WHOLE}
        self.gone |= {n for n, part in self.pieces.slices.items() if part.source == memory}
        seen = {n for n in here if self.there[n] == _WHOLE} - {memory}
        self._expect(not seen, f"{', '.join(seen)} lies there")
        whole = memory in self.there and self.there[memory] == _WHOLE and memory not in frees
        self._expect(not whole or memory in self.call.lent.values(), f"'{memory}' stays")

    def _words(self, found: int | None) -> str:
        return "not there" if found is None else f"that of piece {found}"
