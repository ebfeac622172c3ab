"""Which storages of a step are away, and where in the arena: followed statement by statement."""

from __future__ import annotations

from dataclasses import dataclass

from rkgb.run.program.statements import MoveOut, Moving

_PAGE_BYTES = 4096


@dataclass
class _Moved:
    storage: int
    content: int  # what was copied out
    start: int  # its place in the arena
    end: int
    state: str  # "leaving" while it is copied out, "away", "coming", "there"


class MovedMemory:
    """Follows moves; each method returns what is wrong, or ''."""

    def __init__(self) -> None:
        self.arena_bytes = 0
        self._moves: dict[str, _Moved] = {}

    def out(self, statement: MoveOut, storage: int, content: int) -> str:
        """Follow the start of a copy to the arena."""
        start = statement.offset_bytes
        end = start + -(-statement.size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        if start % _PAGE_BYTES or end > self.arena_bytes:
            return "it is no place in the arena"
        for name, other in self._moves.items():
            if other.start < end and start < other.end:
                return f"'{name}' is in that place"
            if other.storage == storage:
                return f"it is moved already, as '{name}'"
        self._moves[statement.name] = _Moved(storage, content, start, end, "leaving")
        return ""

    def follow(self, statement: Moving, content: int) -> str:
        """Follow a later statement of a move; `content` is what is in the storage."""
        move = self._moves[statement.name]
        first, then = {
            "leave": (("leaving", "there"), "away"),
            "back": (("away",), "coming"),
            "arrive": (("coming",), "there"),
        }[statement.kind]
        if move.state not in first:
            return f"it is {move.state}"
        if move.content != content:
            return "it has been changed since it was copied"
        move.state = then
        return ""

    def storage(self, name: str) -> int:
        """Return the storage of a move."""
        return self._moves[name].storage

    def use(self, storage: int | None, *, writes: bool = False) -> str:
        """Follow a use of a storage by something else than a move."""
        for name, move in self._moves.items():
            if move.storage == storage and (
                move.state in ("away", "coming") or (writes and move.state == "leaving")
            ):
                return f"'{name}' is {move.state}"
        return ""

    def drop(self, name: str) -> str:
        """Follow the end of a move, if this is one."""
        move = self._moves.pop(name, None)
        return f"'{name}' is {move.state}" if move is not None and move.state != "there" else ""
