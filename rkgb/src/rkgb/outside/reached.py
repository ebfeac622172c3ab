"""What a value leads to that may change."""

from __future__ import annotations

import functools
import logging
import threading
import types
import weakref
from collections.abc import Collection, Iterable
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from rkgb.guards.holding import CACHED, can_be_written, home_of, too_long
from rkgb.guards.owners import is_users
from rkgb.outside.held import CONTAINERS, MADE_ANEW, OF_MODULE, attributes_held, content_of
from rkgb.outside.used_up import CLOSED, is_used_up, subject_of

# Of Python's own and torch's, which hold what users put there, by themselves or by methods.
_BAGS = frozenset(
    (
        *("argparse", "collections", "configparser", "contextlib", "optparse", "threading"),
        *("_thread", "_contextvars", "torch.amp.grad_scaler"),
    )
)
_OPTIMIZERS = "torch.optim."  # and their schedulers
_DEPTH = 4  # of containers and objects in each other
_LONG = 512  # longer containers are not looked into
_KEYED = (dict, set, frozenset, weakref.WeakKeyDictionary, weakref.WeakSet)


class Reached:
    """What a value leads to that may change: containers, attributes of objects and classes.

    `asked` are names of attributes: of modules and classes others are not followed. What torch
    calls a module is looked into if it is not `inside` of the model, of which these are the ids.
    Of what is a library's, only names count that code of the user's `sets`.
    """

    def __init__(
        self,
        asked: frozenset[str],
        inside: Collection[int] | None = None,
        sets: Collection[str] = (),
    ) -> None:
        self.asked, self.inside, self.sets = asked, inside, sets
        self.of_libraries: dict[int, Any] = {}  # modules, classes and objects
        self.owners: dict[int, Any] = {}  # containers, `vars` of objects, and classes
        self.used: list[Any] = []
        self.caches: list[Any] = []  # functions that remember their results
        self.long: list[Any] = []  # longer than a guard looks at
        self.closed: list[Any] = []  # modules and tensors
        self.tensors: list[tuple[str, Tensor]] = []  # of these, where values were added by name
        self.keys: list[Any] = []  # of dicts, and items of sets, but those that count by value

    def add(self, value: Any, depth: int = 0) -> None:
        """Add what a value leads to."""
        if type(value) in weakref.ProxyTypes:
            try:
                value = value.__repr__.__self__
            except ReferenceError:  # it is gone
                return
        elif issubclass(type(value), weakref.ref):
            value = value()
        if value is None or id(value) in self.owners:
            return
        if isinstance(value, CLOSED):
            if isinstance(value, (Tensor, nn.Module)):
                self.closed.append(value)
            is_outside = self.inside is not None and id(value) not in self.inside
            if is_outside and isinstance(value, nn.Module) and depth < _DEPTH:
                self._follow_module(value, depth + 1)
        elif type(value) is CACHED:
            self.caches.append(value)
        elif is_used_up(value):
            self.used.append(value)
        elif too_long(value):
            self.long.append(value)
        elif (subject := subject_of(value)) is not None:
            self.add(subject, depth)
        elif depth < _DEPTH:
            self._follow(value, depth + 1)

    def add_named(self, name: str, value: Any) -> None:
        """Add what a value leads to; the tensors among it get its name."""
        known = len(self.closed)
        self.add(value)
        self.tensors += [(name, t) for t in self.closed[known:] if isinstance(t, Tensor)]

    def _follow(self, value: Any, depth: int) -> None:
        if issubclass(type(value), _KEYED):  # not `isinstance`, which asks objects what they are
            self.keys += [key for key in value if not isinstance(key, MADE_ANEW)]
        if can_be_written(value):
            self.owners[id(value)] = value
        elif issubclass(type(value), CONTAINERS):
            self.owners[id(value)] = value
            content = content_of(value) if len(value) <= _LONG else ()
            self._add_all(content.values() if isinstance(content, dict) else content, depth)
        elif isinstance(value, (tuple, frozenset)):
            self._add_all(value, depth)
        elif isinstance(value, functools.partial):
            self._add_all((value.func, value.args, value.keywords), depth)
        elif isinstance(value, (ModuleType, type)):
            home = value.__name__ if isinstance(value, ModuleType) else value.__module__
            if is_users(home):
                self.owners[id(value)] = value
                table = vars(value)
                self._add_all((table[n] for n in self.asked & table.keys()), depth)
            else:
                self._follow_library(value, depth)
        elif isinstance(value, logging.Logger):  # its handlers are nobody's
            for own in (value, value.handlers, value.filters):
                self.owners[id(own)] = own
        else:
            is_followed = _is_bag(value) or is_users(home_of(value))
            held = attributes_held(value) if is_followed else {}
            if held or (is_followed and hasattr(value, "__dict__")):
                self.owners[id(value)] = value
                self._add_all(held.values(), depth)
            elif self.sets and not is_followed and hasattr(value, "__dict__"):
                self.of_libraries[id(value)] = value

    def _follow_library(self, value: ModuleType | type, depth: int) -> None:
        if id(value) not in self.of_libraries:
            self.of_libraries[id(value)], table = value, vars(value)
            found = (table[name] for name in self.asked & table.keys())
            self._add_all([v for v in found if isinstance(v, (ModuleType, type, list))], depth)

    def _follow_module(self, module: nn.Module, depth: int) -> None:
        self.owners[id(module)] = module
        parts = module._modules
        self._add_all((parts[name] for name in self.asked & parts.keys()), depth)
        self._add_all([v for n, v in vars(module).items() if n not in OF_MODULE], depth)

    def _add_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            self.add(value, depth)


def _is_bag(value: Any) -> bool:
    home = type(value).__module__
    if isinstance(value, types.SimpleNamespace) or home in _BAGS:
        return not isinstance(value, threading.Thread)  # which its own run changes
    return isinstance(home, str) and home.startswith(_OPTIMIZERS)
