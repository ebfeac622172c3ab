"""What values count as that do not count by themselves: by identity, by place, or by content."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Same:
    """An object that counts by identity; it is kept alive, so that no other gets its place."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that is kept anywhere but in a table of a module: which one, and of what kind.

    Steps read its content anew. The same number in two places is one tensor in both.
    """

    number: int
    kind: Hashable


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of a module, which has another place as well."""

    path: str


class Content(tuple[Hashable, ...]):
    """What an object counts as that others hold: hashed once, and compared once with an equal one.

    Many lead to the same objects, so that going through all ways to each would not end.
    """

    _hash: int | None = None
    _same: object = None  # one object in those that have been found equal

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not Content or hash(self) != hash(other):
            return False
        if self._same is not None and self._same is other._same:
            return True
        if not super().__eq__(other):
            return False
        self._same = other._same = self._same or other._same or object()
        return True

    def __ne__(self, other: object) -> bool:
        return not self == other
