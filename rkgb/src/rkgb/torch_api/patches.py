"""Functions of torch that are replaced for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any


class Patches:
    """Attributes of modules and classes that have other values while this is active."""

    def __init__(self, patches: Sequence[tuple[Any, str, Any]]) -> None:
        self._new = patches
        self._old = [(place, name, vars(place).get(name)) for place, name, _ in patches]

    def __enter__(self) -> Patches:
        for place, name, value in self._new:
            setattr(place, name, value)
        return self

    def __exit__(self, *_: object) -> None:
        for place, name, value in self._old:
            if value is None:  # inherited
                delattr(place, name)
            else:
                setattr(place, name, value)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """While active, everything is as it was."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
