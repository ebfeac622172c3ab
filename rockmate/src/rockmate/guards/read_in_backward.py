"""What Python of a backward reads: a backward is refused after a change of it."""

from __future__ import annotations

import weakref
from collections.abc import Container, Hashable, Iterator
from operator import is_
from types import FunctionType, NoneType
from typing import Any

from torch import nn

from rkgb.guards import ReadInBackward, Source, Watched, content_of, is_users
from rockmate.errors import UnsupportedModuleError
from rockmate.guards.tables import Tables

_PLAIN = (bool, int, float, str, NoneType)


class PythonOfBackward:
    """What Python of a backward reads, which has to be at the backward as it was at the forward.

    A plain backward reads it when it runs, a planned one has been recorded with it. Of the `model`,
    these are plain attributes of a name that is asked for, and those of torch's own modules that
    are called again (by `torch.utils.checkpoint`). What the step sets itself is `set_by_step`.
    """

    def __init__(
        self, read: ReadInBackward, model: nn.Module | None, set_by_step: Container[tuple[str, str]]
    ) -> None:
        sources = read.sources
        self.model = None if model is None else weakref.ref(model)
        self._watched = Watched(sources.attributes)
        self._read: list[tuple[Source, int]] = []  # with the identity of what was there
        for source in sources.places.values():
            value = source.read()
            self._read.append((source, id(value)))
            self._watched.worth(value)
            source.watch(self._watched, value)
        # Of each submodule: its path, its attributes, and the names and values of the plain ones.
        self._plain: list[tuple[str, dict[str, Any], list[str], list[Any]]] = []
        for path, module in () if model is None else model.named_modules():
            table = vars(module)
            # What classes of torch ask for is not seen.
            every = path in read.called_again and not is_users(type(module).__module__)
            names = table.keys() if every else sources.attributes & table.keys()
            plain = [n for n in names if isinstance(table[n], _PLAIN)]
            plain = [name for name in plain if (path, name) not in set_by_step]
            if plain:
                self._plain.append((path, table, plain, [table[name] for name in plain]))
        tables = [*self._watched.tables, *(table for _, table, _, _ in self._plain)]
        watched = self._watched
        self._tables = Tables()
        self._tables.close(tables, watched.objects, watched.fields(), watched.empty)

    def is_of(self, model: nn.Module | None) -> bool:
        """Return whether the attributes are this model's."""
        return model is (None if self.model is None else self.model())

    def holds(self) -> bool:
        """Return whether everything is as it was."""
        written, untouched = self._tables.written(), self._tables.is_untouched
        if not self._watched.holds(written, untouched=untouched):
            return False
        if not untouched and any(self._changed()):
            return False
        self._tables.pass_over()
        return True

    def _changed(self) -> Iterator[str]:
        for path, table, names, values in self._plain:
            if all(map(is_, map(table.get, names), values)):
                continue
            for name, known in zip(names, values, strict=True):
                if _counts_as(table.get(name)) != _counts_as(known):
                    yield f"attribute '{name}' of module '{path or '(root)'}'"

    def _told(self) -> list[str]:
        """Return what has changed, or all that is read where a change is inside of something."""
        changed = [s.named for s, known in self._read if id(s.read()) != known]
        every = [s.named for s, _ in self._read if not isinstance(s.owner, FunctionType)]
        return [*self._changed(), *changed] or every

    def refuse_changes(self, model_name: str) -> None:
        """Refuse a backward that would read something else.

        Raises:
            UnsupportedModuleError: something differs.
        """
        if not self.holds():
            raise UnsupportedModuleError(
                f"the backward of {model_name} runs Python that reads "
                f"{', '.join(self._told())}, and some of that has changed "
                "since the forward, whose plan was made with what was there then. Change it after "
                "the backward, or run the forward of that step under `with rockmate.plain():`."
            )


def _counts_as(value: Any) -> Hashable:
    """Return what a plain value counts as in all guards: 0.0 is not -0.0, and nan is nan."""
    return content_of(value, frozenset())
