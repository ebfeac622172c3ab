"""The tables of a snapshot's modules, and which of them were written to since the last check.

A table is a dict of a module: its attributes, submodules, parameters, buffers or hooks. Most of
them are empty, and most are never written to after the model has been made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import nn

from rkgb.torch_api import dict_versions, heads_of

Table = dict[Any, Any]


class Tables:
    """The tables of some modules, which it keeps alive; `close` begins to watch them."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self._own: list[Table] = []  # the attributes of each module
        self._full: list[Table] = []  # other tables that are not empty
        self._empty: list[Table] = []
        # By the id of a table: whether its part of the key still holds after a write.
        self._checks: dict[int, Callable[[], bool]] = {}

    is_untouched = False  # at the last look, objects and fields included

    def add(self, module: nn.Module, names: Sequence[str]) -> list[tuple[str, Table]]:
        """Add a module and its tables of these names; return those that are not empty."""
        own = vars(module)
        self.modules.append(module)
        self._own.append(own)
        self._checks[id(own)] = _holds_tables(own, names)
        full = [(name, own[name]) for name in names if own[name]]
        for name, table in full:
            self._full.append(table)
            self._checks[id(table)] = _holds_as_many(table, in_order=name == "_modules")
        self._empty += (own[name] for name in names if not own[name])
        return full

    def close(
        self,
        others: Iterable[Table],
        objects: Sequence[Any],
        fields: Sequence[tuple[Any, str]],
        empty: Sequence[Any],
    ) -> None:
        """Look from now on whether everything is as it is now, also in other tables.

        Whether other `objects` have the same types and `fields`, and whether what is `empty` is so
        still, is looked at where that is quick.
        """
        self._types = [*map(type, self.modules)]  # parametrizations change it in place
        self._every = [*{id(t): t for t in chain(self._own, self._full, others)}.values()]
        self._versions = self._now = dict_versions(self._every)
        # All of it at once; None where that cannot be read.
        typed = (*self.modules, *objects)
        self._heads = heads_of(typed, [*self._empty, *empty], self._every, fields)
        self._known_heads = self._heads_now = self._heads and self._heads()

    def written(self) -> Sequence[Table] | None:
        """Return the tables that were written to; None if something else may have changed."""
        self.is_untouched = False
        if self._heads is not None:
            self._heads_now = self._heads()
            if self._heads_now == self._known_heads:
                self.is_untouched = True
                return ()
        if any(self._empty) or [*map(type, self.modules)] != self._types:
            return None
        self._now = dict_versions(self._every)
        if self._now is None or self._versions is None:  # this torch has none
            return self._every
        if self._now == self._versions:
            return ()
        rows = zip(self._every, self._now, self._versions, strict=True)
        return [table for table, now, then in rows if now != then]

    def hold(self, written: Sequence[Table]) -> bool:
        """Whether these have the same number of entries, and submodules the same order."""
        return all(self._checks.get(id(table), _always)() for table in written)

    def pass_over(self) -> None:
        """Ignore what was written since the last look: it has changed nothing that counts."""
        self._versions, self._known_heads = self._now, self._heads_now


def _always() -> bool:
    return True


def _holds_tables(own: Table, names: Sequence[str]) -> Callable[[], bool]:
    read, count = itemgetter(*names), len(own)
    tables = read(own)

    def holds() -> bool:
        try:
            return len(own) == count and all(map(is_, read(own), tables))
        except KeyError:  # one was deleted
            return False

    return holds


def _holds_as_many(table: Table, *, in_order: bool) -> Callable[[], bool]:
    if in_order:
        names = [*table]
        return lambda: [*table] == names
    count = len(table)
    return lambda: len(table) == count
