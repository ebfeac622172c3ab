"""Other threads that draw random numbers from the same generators at the same time."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from rkgb.device.rng import RngState
from rkgb.guards.code_watch import Seen
from rkgb.guards.loads import loads_of
from rkgb.module_state.start_of_call import PythonRandom, draw_from_numpy, numpy_state

_LOOKS, _PAUSE_S = 100, 0.002  # on a busy machine another thread may wait long for a core
_OF_NUMPY = frozenset(
    (
        *("numpy", "np", "rand", "randn", "random_sample", "standard_normal", "permutation"),
        *("normal", "binomial", "poisson", "exponential", "multinomial", "get_state", "set_state"),
    )
)


def same_state(a: Any, b: Any) -> bool:
    """Return whether two random states, of Python or numpy, are equal."""
    if a is None or b is None:
        return a is b
    pairs = zip(a, b, strict=True)
    return all(bool((x == y).all()) if hasattr(x, "all") else x == y for x, y in pairs)


def changes_meanwhile(
    draw: Callable[[], object], state: Callable[[], Any], is_same: Callable[[Any, Any], bool]
) -> bool:
    """Return whether a state changes while this thread waits, after it has drawn once.

    Without the draw, a thread that seeds repeatedly would leave an unchanged state.
    """
    if threading.active_count() == 1:
        return False
    draw()
    before = state()
    for _ in range(_LOOKS):
        time.sleep(_PAUSE_S)
        if not is_same(before, state()):
            return True
    return False


def drawn_elsewhere(device: torch.device) -> list[str]:
    """Return the generators that another thread uses; this thread's random state is restored."""
    stream, python = RngState.save(device), PythonRandom()

    looks: list[tuple[str, Any, Any, Any]] = [
        ("torch", lambda: torch.rand(1, device=device), lambda: RngState.save(device), None),
        ("Python", random.random, random.getstate, same_state),
        ("numpy", draw_from_numpy, numpy_state, same_state),
    ]
    found = [
        name
        for name, draw, state, is_same in looks
        if changes_meanwhile(draw, state, is_same or RngState.equals)
    ]
    if not found:
        stream.restore()
        python.restore()
    return found


def other_threads() -> str:
    """Return the names of the other threads."""
    here = threading.get_ident()
    return ", ".join(f"'{t.name}'" for t in threading.enumerate() if t.ident != here)


def may_draw(ran: Iterable[Seen]) -> bool:
    """Return whether the code of these functions may draw random numbers of Python or numpy."""
    names = {name for name in vars(random) if not name.startswith("_")} | _OF_NUMPY
    known = (random, sys.modules.get("numpy"), sys.modules.get("numpy.random"))
    for seen in ran:
        loads = loads_of(seen.code)
        if not names.isdisjoint((*loads.globals, *loads.attributes, *loads.imports)):
            return True
        held = [seen.globals.get(name) for name in loads.globals]
        if any(value is module for value in held for module in known if module is not None):
            return True
    return False
