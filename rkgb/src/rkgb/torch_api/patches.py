"""Functions that are replaced for a while, for one thread.

The attributes of modules and classes are everybody's. So what stands there meanwhile asks which
thread calls: another one gets what was there before. Threads may replace the same function at once,
and end in any order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_ABSENT: Any = object()  # the attribute is inherited
_lock = threading.RLock()
_standing: dict[int, _Replacement] = {}  # by identity of what stands in the place


@dataclass(frozen=True)
class ForAll:
    """What every thread finds in a place: torch compares it."""

    value: Any


class Patches:
    """Functions of modules and classes that are others in this thread while this is active.

    Other threads get what was there, or what a replacement has as its `elsewhere`.
    """

    def __init__(self, patches: Sequence[tuple[Any, str, Any]]) -> None:
        self._replacements = [_Replacement(*patch) for patch in patches]

    def __enter__(self) -> Patches:
        with _lock:
            for replacement in self._replacements:
                replacement.begin()
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            for replacement in reversed(self._replacements):
                replacement.end()

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """While active, everything is as it was."""
        active = [r for r in self._replacements if r.turn.is_active]
        self.__exit__()
        try:
            yield
        finally:
            with _lock:
                for replacement in active:
                    replacement.begin()


@dataclass
class _Turn:
    """Whose a replacement is, and whether it is its turn."""

    thread: int
    is_active: bool = False


class _Replacement:
    """One attribute, what is called in its place, and what was there before."""

    def __init__(self, place: Any, name: str, value: Any) -> None:
        self.place, self.name = place, name
        self.turn = _Turn(threading.get_ident())
        self.before = vars(place).get(name, _ABSENT)
        before = getattr(place, name, None)
        self.value: Any
        if isinstance(value, ForAll):
            self.value = value.value
        elif isinstance(value, staticmethod):
            self.value = staticmethod(self._call(value.__func__, before))
        else:
            self.value = self._call(value, before)

    def _call(self, value: Callable[..., Any], before: Any) -> Callable[..., Any]:
        # It holds no replacement, which holds it: what it leads to goes at once.
        elsewhere, turn = getattr(value, "elsewhere", before), self.turn

        def call(*args: Any, **kwargs: Any) -> Any:
            if turn.is_active and not is_elsewhere(turn.thread):
                return value(*args, **kwargs)
            return elsewhere(*args, **kwargs)

        return call

    def begin(self) -> None:
        self.turn.is_active = True
        if id(self.value) not in _standing:
            _standing[id(self.value)] = self
            self.before = vars(self.place).get(self.name, _ABSENT)
            setattr(self.place, self.name, self.value)

    def end(self) -> None:
        self.turn.is_active = False
        # Where another one stands, it goes with that.
        while (standing := self._standing()) is not None and not standing.turn.is_active:
            del _standing[id(standing.value)]
            if standing.before is _ABSENT:
                delattr(self.place, self.name)
            else:
                setattr(self.place, self.name, standing.before)

    def _standing(self) -> _Replacement | None:
        return _standing.get(id(vars(self.place).get(self.name, _ABSENT)))


@contextlib.contextmanager
def as_before(place: Any) -> Iterator[None]:
    """While active, this thread finds the functions of a class or module as they were."""
    here = threading.get_ident()
    with _lock:
        found = [r for r in _standing.values() if r.place is place and r.turn.is_active]
        mine = [r for r in found if r.turn.thread == here]
        for replacement in reversed(mine):
            replacement.end()
    try:
        yield
    finally:
        with _lock:
            for replacement in mine:
                replacement.begin()


def is_elsewhere(here: int) -> bool:
    """Whether this is another thread than `here`, and none of those that autograd starts."""
    now = threading.get_ident()
    if now == here:
        return False
    # Python does not know autograd's own threads, in which our backwards may run.
    dummy = threading._DummyThread
    return any(t.ident == now and not isinstance(t, dummy) for t in threading.enumerate())
