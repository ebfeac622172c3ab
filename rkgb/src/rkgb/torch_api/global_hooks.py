"""Hooks that torch calls for every module of a process, as profilers and counters register them.

A planned step calls no submodules, so it would call none of these hooks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn.modules import module as torch_module

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
