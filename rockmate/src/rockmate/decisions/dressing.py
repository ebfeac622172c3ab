"""Redirects calls of submodules while a call of their root runs, only in its thread.

For that time a submodule gets another class of the same name. It stays the same object, so other
code that holds it, calls it, or reads its attributes is not affected. The call restores the class.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import nn

from rkgb.recording import transparent_checkpoints
from rockmate.guards.module_state import UNDRESSED


class Lead(Protocol):
    """The target of redirected calls: it returns the forward for the submodule at a path."""

    def __call__(self, path: str, /, *args: Any, **kwargs: Any) -> Any: ...


class _Here(threading.local):
    lead: Lead | None = None
    dressing: Dressing | None = None


_here = _Here()
_lock = threading.Lock()
_worn: Counter[int] = Counter()  # number of calls in which a module is dressed, by its id
_classes: dict[type, type] = {}


class _LedForward:
    """`forward` of a dressed module; it takes precedence over a `forward` in its attributes."""

    kind: Any  # the class of the module while it is dressed

    def __init__(self, base: Any) -> None:
        self.base = base

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return self.base.forward  # read on the class
        lead, dressing = _here.lead, _here.dressing
        path = None if dressing is None else dressing.paths.get(id(module))
        if lead is None or path is None:
            own = vars(module).get("forward")
            return super(self.kind, module).forward if own is None else own  # type: ignore[misc]
        return lambda *args, **kwargs: lead(path, *args, **kwargs)

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)["forward"] = value

    def __delete__(self, module: Any) -> None:
        del vars(module)["forward"]


def _dressed(base: Any) -> type:
    known = _classes.get(base)
    if known is None:
        led = _LedForward(base)
        names = ("__module__", "__qualname__", "__doc__")
        space = {"forward": led, UNDRESSED: base, **{name: getattr(base, name) for name in names}}
        led.kind = known = type(base)(base.__name__, (base,), space)
        type.__setattr__(known, "forward", led)  # a library may have wrapped it: transformers does
        _classes[base] = known
    return known


class Dressing:
    """Submodules of a model whose calls can be redirected, by path."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.paths = {id(module): path for path, module in modules.items()}
        self._rows = [(m, type(m), _dressed(type(m))) for m in modules.values()]

    @contextlib.contextmanager
    def led_to(self, lead: Lead) -> Iterator[None]:
        """Redirect their calls to `lead` while active.

        Checkpoints around them are switched off, because only the plan decides on recomputation.
        """
        self._put_on()
        before = _here.lead, _here.dressing
        _here.lead, _here.dressing = lead, self
        try:
            with transparent_checkpoints():
                yield
        finally:
            _here.lead, _here.dressing = before
            self._take_off()

    def _put_on(self) -> None:
        with _lock:
            for module, _, dressed in self._rows:
                _worn[id(module)] += 1
                if _worn[id(module)] == 1:
                    object.__setattr__(module, "__class__", dressed)

    def _take_off(self) -> None:
        with _lock:
            for module, own, _ in self._rows:
                _worn[id(module)] -= 1
                if not _worn[id(module)]:
                    del _worn[id(module)]
                    object.__setattr__(module, "__class__", own)


@contextlib.contextmanager
def undressed() -> Iterator[None]:
    """Undo this thread's redirection while active, inside a redirected call."""
    lead, dressing = _here.lead, _here.dressing
    if dressing is None:
        yield
        return
    _here.lead = _here.dressing = None
    dressing._take_off()
    try:
        yield
    finally:
        dressing._put_on()
        _here.lead, _here.dressing = lead, dressing
