"""Temporary replacements of functions, for one thread.

All threads share the attributes of modules and classes. So a replacement tests which thread calls
it, and other threads get the original. Several threads may replace the same function at the same
time, and end in any order.

Torch calls some hooks for every module of a process, as profilers and counters register them. A
planned step calls no submodules, so it would call none of these.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn.modules import module as torch_module

from rkgb.torch_api.quiet import is_elsewhere

_ABSENT: Any = object()  # the attribute is inherited
_lock = threading.RLock()
_standing: dict[int, _Replacement] = {}  # by id of the replacing object


@dataclass(frozen=True)
class ForAll:
    """A replacement for all threads, because torch compares the object."""

    value: Any


class Patches:
    """While active, replaces functions of modules and classes in this thread.

    Other threads get the original, or the attribute `elsewhere` of a replacement.
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
        """While active, the replacements are undone."""
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
    """The thread of a replacement, and what replaces while it is active.

    Modules that are imported meanwhile keep the replacing function. It keeps nothing but this.
    """

    thread: int
    value: Any = None

    @property
    def is_active(self) -> bool:
        """Whether it replaces now."""
        return self.value is not None


class _Replacement:
    """One attribute, its replacement, and its original value."""

    def __init__(self, place: Any, name: str, value: Any) -> None:
        self.place, self.name = place, name
        self.turn = _Turn(threading.get_ident())
        self.before = vars(place).get(name, _ABSENT)
        before = getattr(place, name, None)
        self.value: Any
        self._called: Any = value.__func__ if isinstance(value, staticmethod) else value
        if isinstance(value, ForAll):
            self.value = value.value
        elif isinstance(value, staticmethod):
            self.value = staticmethod(self._call(self._called, before))
        else:
            self.value = self._call(value, before)

    def _call(self, value: Callable[..., Any], before: Any) -> Callable[..., Any]:
        # It does not refer to the replacement, which refers to it, so that both are freed at once.
        elsewhere, turn = getattr(value, "elsewhere", before), self.turn

        def call(*args: Any, **kwargs: Any) -> Any:
            now = turn.value
            if now is not None and not is_elsewhere(turn.thread):
                return now(*args, **kwargs)
            return elsewhere(*args, **kwargs)

        return call

    def begin(self) -> None:
        self.turn.value = self._called
        if id(self.value) not in _standing:
            _standing[id(self.value)] = self
            self.before = vars(self.place).get(self.name, _ABSENT)
            setattr(self.place, self.name, self.value)

    def end(self) -> None:
        self.turn.value = None
        # If another replacement is on top, this one is removed together with it.
        while (standing := self._standing()) is not None and not standing.turn.is_active:
            del _standing[id(standing.value)]
            if standing.before is _ABSENT:
                delattr(self.place, self.name)
            else:
                setattr(self.place, self.name, standing.before)

    def _standing(self) -> _Replacement | None:
        return _standing.get(id(vars(self.place).get(self.name, _ABSENT)))


def meant(value: Any, absent: Any = None) -> Any:
    """Return what is in a place where functions stand for a while; `absent` where nothing is."""
    while (standing := _standing.get(id(value))) is not None:  # one may stand on another
        if standing.before is _ABSENT:
            return absent
        value = standing.before
    return value


@contextlib.contextmanager
def as_before(place: Any) -> Iterator[None]:
    """While active, this thread gets the original functions of a class or module."""
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


_TABLES: tuple[dict[int, Any], ...] = (
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
    torch_module._global_backward_pre_hooks,
    torch_module._global_backward_hooks,
)
_TRACKER = "torch.utils.module_tracker"  # tells `FlopCounterMode` which module runs


def has_global_hooks() -> bool:
    """Return whether there are hooks for every module, other than those that track modules."""
    return any(_TABLES) and not all(_only_tracks(hook) for t in _TABLES for hook in t.values())


def _only_tracks(hook: Any) -> bool:
    return type(getattr(hook, "__self__", None)).__module__ == _TRACKER


@contextlib.contextmanager
def without_global_hooks() -> Iterator[None]:
    """Disable hooks for every module in this thread: planning runs copies, which are internal.

    Other threads are not affected.
    """
    here = threading.get_ident()

    def elsewhere(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return None if threading.get_ident() == here else hook(*args, **kwargs)

        return call

    kept = [dict(table) for table in _TABLES]
    for table, own in zip(_TABLES, kept, strict=True):
        table.update({key: elsewhere(hook) for key, hook in own.items()})
    try:
        yield
    finally:
        for table, own in zip(_TABLES, kept, strict=True):
            table.update({key: hook for key, hook in own.items() if key in table})
