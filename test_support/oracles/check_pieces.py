"""Check a call that runs piece by piece, without running it: what it reads, adds up and frees.

Values are followed by name. Each is a whole one or a piece with its number; a sum, or a whole that
pieces are written into, is there when every piece has come exactly once. Nothing here is shared
with what lays out or runs pieces.
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


class _Check:
    def __init__(self, call: InPieces) -> None:
        self.call, self.pieces = call, call.pieces
        self.there = dict.fromkeys(call.pieces.takes, _WHOLE)  # value -> the piece it is
        self.come: dict[str, list[int]] = {n: [] for n in self.pieces.summed}  # pieces so far
        self.come |= {n: [] for n in self.pieces.gathered}
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
        self.where = "the end of the pieces"
        self._free(call.done)
        for name, come in self.come.items():
            self._expect(come == [*range(pieces.count)], f"'{name}' has pieces {come}")
            self.there[name] = _WHOLE
        self._lines("after the pieces", call.after, _WHOLE)
        self.where = "the end"
        for name in pieces.results:
            self._expect(self.there.get(name) == _WHOLE, f"'{name}' is not there")
        left = sorted(self.there.keys() - {*pieces.results, *pieces.takes})
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
            for name in line.op.inputs:
                found = self.there.get(name)
                self._expect(found in (_WHOLE, index), f"'{name}' is {self._words(found)}")
            for name in filter(None, line.op.results):
                self._expect(name not in self.there, f"'{name}' is there already")
                if name in self.come and index != _WHOLE:
                    self.come[name].append(index)
                if name not in self.pieces.summed or index == _WHOLE:
                    self.there[name] = index
            self._free(n for n in line.frees if n not in self.pieces.summed or index == _WHOLE)

    def _free(self, names: Iterable[str]) -> None:
        for name in names:
            self._expect(name in self.there, f"'{name}' is freed, and is not there")
            self._expect(name not in self.pieces.takes, f"'{name}' is not its own to free")
            del self.there[name]

    def _words(self, found: int | None) -> str:
        return "not there" if found is None else f"that of piece {found}"
