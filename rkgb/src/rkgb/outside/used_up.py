"""What changes by being used, and cannot be looked at without: iterators, files, queues."""

from __future__ import annotations

import copy
import io
import random
import sys
import types
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.errors import SideEffectError
from rkgb.guards.holding import BOUND, home_of
from rkgb.torch_api.private.scripted import ScriptFunction, anew
from rkgb.torch_api.quiet import without_warnings

CLOSED = (str, bytes, int, float, complex, Tensor, nn.Module, torch.dtype)  # not looked into
_OF_NUMPY = ("bit_generator", "get_state")  # generators of random numbers have one of these
# Of queues, of what writes to files, and of connections.
_USED_UP = frozenset(
    (
        *("queue", "_queue", "multiprocessing.queues", "multiprocessing.connection"),
        *("_csv", "sqlite3", "socket", "_socket", "ssl"),
    )
)
_STREAMS = (io.IOBase, types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


def is_used_up(value: Any) -> bool:
    """Whether a value is one that changes by being used, and cannot be looked at without.

    Examples:
        >>> is_used_up(iter([1])), is_used_up([1])
        (True, False)
    """
    kind, home = type(value), home_of(type(value))
    if (subject := subject_of(value)) is not None:
        return is_used_up(subject)
    # By its type: the `__class__` of a library of C raises an error.
    if issubclass(kind, (random.Random, ScriptFunction, *_STREAMS)) or home in _USED_UP:
        return True
    if isinstance(value, torch.Generator):
        return value is not torch.default_generator
    if home.startswith("numpy.random") and any(hasattr(value, n) for n in _OF_NUMPY):
        return True
    return hasattr(kind, "__next__") and not isinstance(value, CLOSED)


def subject_of(value: Any) -> Any:
    """Return the object of a method; None for others, and of random numbers that all draw."""
    if not isinstance(value, (MethodType, *BOUND)):
        return None
    known = (random.random, getattr(sys.modules.get("numpy.random"), "random", None))
    subject = value.__self__
    is_known = any(subject is getattr(method, "__self__", None) for method in known)
    return None if is_known or isinstance(subject, (ModuleType, type)) else subject


class Untouched:
    """Stands in for an open file, a generator or a queue, which a forward may have but not use."""

    def __init__(self, place: str) -> None:
        self._place = place

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise SideEffectError(
            f"the forward uses {self._place}: recording a step would read or write it once more "
            "than the step does. Use it outside of the forward, and pass what it gives as an "
            "argument."
        )

    __getattr__ = __iter__ = __next__ = __enter__ = __exit__ = __call__ = __bool__ = _refuse

    def __deepcopy__(self, _memo: Any) -> Untouched:
        return self


def copied(value: Any) -> Any:
    """Return a copy of what changes by being used, or what stands in for it."""
    if (subject := subject_of(value)) is not None:
        return getattr(copied(subject), value.__name__)
    if isinstance(value, ScriptFunction):  # its first calls compile it, to other bits
        return anew(value)
    try:
        with without_warnings():  # Python 3.12 warns that 3.14 copies no iterators of itertools
            return copy.deepcopy(value)
    except Exception:  # files, generators
        return Untouched(f"an open file, a generator or a queue ({type(value).__name__})")
