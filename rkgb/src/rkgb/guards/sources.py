"""The places outside of a call that functions read: variables, cells, defaults, modules.

They are found from the functions that ran (`CodeWatch`). Nothing of the copy of a module that runs
is among them: where a function holds a copy, the user's function that it was made of counts.
"""

from __future__ import annotations

import builtins
import gc
import logging
import os
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.guards.code_watch import Seen
from rkgb.guards.entries import ABSENT, attributes_of, cell_content
from rkgb.guards.loads import OWN, loads_of
from rkgb.guards.owners import hands_on, is_ours, is_pythons
from rkgb.guards.watched import Watched
from rkgb.torch_api.patches import meant
from rkgb.torch_api.tensor_facts import fact

_BUILTINS = vars(builtins)
_Environ = type(os.environ)


@dataclass(frozen=True, slots=True)
class Source:
    """A place that can be read again, and in words which, and where it was read."""

    # The variables of a module, a cell, a function, which is called where there is no name, or a
    # weak reference to a tensor, which is asked for a fact.
    owner: Any
    name: str
    told: str
    where: str  # file.py:12

    @property
    def is_of_tensor(self) -> bool:
        """Whether it is a fact of a tensor: what runs whole gets another one."""
        return isinstance(self.owner, weakref.ref)

    @property
    def key(self) -> tuple[int, str]:
        """What tells it from others; the owner is alive."""
        return id(self.owner), self.name

    @property
    def named(self) -> str:
        """What it is, and where it was read."""
        return f"{self.told} ({self.where})" if self.where else self.told

    def read(self) -> Any:
        """Return what is there now, or `ABSENT`."""
        if isinstance(self.owner, dict):
            return meant(self.owner.get(self.name, ABSENT), ABSENT)
        if isinstance(self.owner, CellType):
            return cell_content(self.owner)
        if isinstance(self.owner, weakref.ref):
            tensor = self.owner()
            return ABSENT if tensor is None else fact(tensor, self.name)
        return getattr(self.owner, self.name) if self.name else self.owner()

    def watch(self, watched: Watched, value: Any) -> None:
        """Look from now on whether it is the same object still."""
        if isinstance(self.owner, dict):
            watched.entries(self.owner).note(self.name, value)
        elif isinstance(value, Tensor):
            known = id(value)  # it is not kept alive; that it lives is checked beside this
            watched.checks.append(lambda: id(self.read()) == known)
        elif isinstance(self.owner, FunctionType):
            watched.note_attribute(self.owner, self.name, value)
        elif isinstance(self.owner, CellType) and value is not ABSENT:
            watched.note_attribute(self.owner, "cell_contents", value)
        else:
            watched.checks.append(lambda: self.read() == value)


@dataclass
class Sources:
    """Places that are read, and the names of attributes that are asked for anywhere.

    Each place and name has the paths of the submodules whose Python reads it.
    """

    places: dict[tuple[int, str], Source] = field(default_factory=dict)
    paths: dict[tuple[int, str], frozenset[str]] = field(default_factory=dict)
    asked: dict[str, frozenset[str]] = field(default_factory=dict)  # names, and who asks for them
    # Modules outside of the one that is recorded that were called, by identity.
    called: dict[int, weakref.ref[nn.Module]] = field(default_factory=dict)
    settings: tuple[Any, ...] = ()  # what a first call sets (`Setting`)
    of_backward: ReadInBackward | None = None  # if Python of a backward reads any

    @classmethod
    def of(
        cls,
        seen: Iterable[Seen],
        copies: Mapping[int, Any] | None = None,
        library: Iterable[Seen] = (),
        *,
        are_known: bool = False,
    ) -> Sources:
        """Return what these functions read; `copies` are of the user's objects, by identity.

        If they `are_known`, they were looked up a moment ago, by `look_up`.
        Of functions of a `library` that ran, that they are the same counts, and what they call.
        """
        found, known = cls(), list(seen)
        for one in known:
            loads = loads_of(one.code)
            own = (OWN + name for name in loads.attributes)
            found._ask((*loads.attributes, *own, *one.names, one.code.co_name), one)
            for name, line in (*loads.globals.items(), *loads.stores.items()):
                where = _line(one.code, line)
                if name in loads.globals or name in one.globals:
                    told = f"global '{name}' of {one.globals.get('__name__', 'a module')}"
                    found._add(Source(one.globals, name, told, where), one)
                if name not in one.globals and name in loads.globals:
                    found._add(Source(_BUILTINS, name, f"builtin '{name}'", where), one)
            made = dict.fromkeys(one.imports, one.code.co_firstlineno)
            for name, line in (*loads.imports.items(), *made.items()):
                if name in sys.modules or name in loads.imports:  # what is not there may come
                    told = f"module '{name}'"
                    found._add(Source(sys.modules, name, told, _line(one.code, line)), one)
            for name in one.loggers:
                loggers = logging.Logger.manager.loggerDict
                if name in loggers:
                    told = f"logger '{name}'"
                    found._add(Source(loggers, name, told, _line(one.code, 0)), one)
            for name in one.says:
                source = Source(getattr(torch._C, name), "", f"'{name.lstrip('_')}()' of torch", "")
                found._add(source, one)
        for one, function in _functions(known, copies or {}, are_known=are_known):
            found._add_function(one, function, copies or {})
        for one in library:
            found._add_of_library(one)
        return found

    def joined(self, other: Sources) -> Sources:
        """Return the places of both; this very object where the other has none of its own."""
        if (
            all(paths <= self.asked.get(n, frozenset()) for n, paths in other.asked.items())
            and other.called.keys() <= self.called.keys()
            and all(paths <= self.paths.get(k, frozenset()) for k, paths in other.paths.items())
        ):
            return self
        paths = {
            key: self.paths.get(key, frozenset()) | other.paths.get(key, frozenset())
            for key in (*self.places, *other.places)
        }
        return Sources(
            {**self.places, **other.places},
            paths,
            {
                name: self.asked.get(name, frozenset()) | other.asked.get(name, frozenset())
                for name in (*self.asked, *other.asked)
            },
            {**self.called, **other.called},
            of_backward=self.of_backward,
        )

    @property
    def attributes(self) -> frozenset[str]:
        """The names of attributes that are asked for."""
        return frozenset(self.asked)

    def asked_beside(self, passed: Callable[[str], bool]) -> set[str]:
        """Return the names that submodules ask for whose paths are not `passed`."""
        return {name for name, paths in self.asked.items() if not all(map(passed, paths))}

    def calls(self, module: nn.Module) -> bool:
        """Whether a module outside of the one that is recorded was called."""
        known = self.called.get(id(module))
        return known is not None and known() is module

    def ask(self, names: Iterable[str]) -> None:
        """Take it that all submodules ask for attributes of these names."""
        self.asked = {**self.asked, **dict.fromkeys(names, frozenset(("",)))}

    def add_fact(self, tensor: Tensor, name: str, where: str) -> None:
        """Add what a tensor is asked for (`torch_api/tensor_facts.py`), by any submodule."""
        source = Source(weakref.ref(tensor), name, f"'{name}' of a tensor of the module", where)
        self.places.setdefault(source.key, source)
        self.paths[source.key] = frozenset(("",))

    def _ask(self, names: Iterable[str], seen: Seen) -> None:
        for name in names:
            self.asked[name] = self.asked.get(name, frozenset()) | seen.paths

    def _add(self, source: Source, seen: Seen) -> None:
        self.places.setdefault(source.key, source)
        self.paths[source.key] = self.paths.get(source.key, frozenset()) | seen.paths

    def _add_function(self, seen: Seen, function: FunctionType, copies: Mapping[int, Any]) -> None:
        name, loads = function.__qualname__, loads_of(seen.code)
        for free, cell in zip(seen.code.co_freevars, function.__closure__ or (), strict=True):
            source = Source(cell, "", f"variable '{free}' around {name}", "")
            if free in loads.free or free in loads.stores:
                line = loads.free.get(free) or loads.stores.get(free, 0)
                source = Source(cell, "", source.told, _line(seen.code, line))
                if id(source.read()) not in copies:
                    self._add(source, seen)
        where = _line(seen.code, seen.code.co_firstlineno)
        for kind in ("__defaults__", "__kwdefaults__", "__code__"):
            what = "the code" if kind == "__code__" else "the defaults"
            self._add(Source(function, kind, f"{what} of {name}", where), seen)

    def _add_of_library(self, seen: Seen) -> None:
        """Add that a function of a library is the same one still, and what it calls."""
        code, loads = seen.code, loads_of(seen.code)
        home = str(seen.globals.get("__name__", "a module"))
        if home == os.__name__ and code.co_qualname.startswith(_Environ.__name__):
            self._add(Source(vars(os.environ), "_data", "environment of the process", ""), seen)
        if hands_on(home):  # as `enum` and `functools` do for what the user has made
            self._ask(loads.attributes, seen)
        owner = seen.globals
        *around, own = code.co_qualname.split(".")
        for name in around:
            owner = attributes_of(owner.get(name)) or {}
        function = unbound(owner.get(own))
        if isinstance(function, FunctionType) and function.__code__ is code:
            name = f"function {home}.{code.co_qualname}"
            self._add(Source(owner, own, name, ""), seen)
            self._add(Source(function, "__code__", f"the code of {name}", ""), seen)
        for name in loads.globals:
            value = seen.globals.get(name)
            # Of modules of Python's own (`sys` leads to all modules) what is called is enough.
            is_followed = isinstance(value, ModuleType) and not is_pythons(value.__name__)
            decides = isinstance(value, ContextVar)  # by what a user has set
            decides |= isinstance(value, logging.Logger) and home == logging.__name__
            if callable(value) or is_followed or decides:
                self._add(Source(seen.globals, name, f"'{name}' of {home}", ""), seen)
            if isinstance(value, ModuleType) and not is_ours(value.__name__):
                for called in loads.attributes.keys() & vars(value).keys():
                    if callable(vars(value)[called]):
                        told = f"'{called}' of {value.__name__}"
                        self._add(Source(vars(value), called, told, ""), seen)


@dataclass(frozen=True)
class ReadInBackward:
    """What Python of a backward reads, and the submodules that a plain backward calls again."""

    sources: Sources
    called_again: frozenset[str]  # their paths


def _line(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename).name}:{line}"


def _functions(
    seen: Iterable[Seen], copies: Mapping[int, Any], *, are_known: bool
) -> Iterator[tuple[Seen, FunctionType]]:
    """Yield the function objects behind the codes that have run.

    Most are found where their name is. Looking through everything that Python keeps takes some
    milliseconds, once for all others; what it finds is remembered.
    """
    others: list[Seen] = []
    for one in seen:
        if one.code.co_name.endswith(("comp>", "genexpr>")):  # made where it ran
            continue
        named = None if one.code.co_freevars else function_named(one)
        if named is not None:
            yield one, named
        else:
            others.append(one)
    new = [] if are_known else others
    new = [one for one in new if not _is_known(one)]
    found: dict[int, list[FunctionType]] = {id(one.code): [] for one in new}
    for function in _holding([one.code for one in new]):
        # No `isinstance`: some objects of torch answer it with a warning.
        if type(function) is FunctionType and id(function.__code__) in found:
            found[id(function.__code__)].append(function)
    for one in new:
        while len(_known) >= _MOST:
            del _known[next(iter(_known))]
        known = _known[id(one.code)] = Known(one, found[id(one.code)])
        known.holders = _holders(one)
    set_cells = {id(cell) for one in others for cell in _cells_set_by(one)}
    for one in others:
        ours = _of_the_code(one)
        ran = [f for f in ours if any(_has_run(f, t, copies, set_cells) for t in one.free)]
        yield from ((one, function) for function in ran or ours)


def _cells_set_by(seen: Seen) -> Iterator[CellType]:
    """Yield the variables of functions around that a code may have set."""
    stores = loads_of(seen.code).stores
    for function in _of_the_code(seen) if stores else ():
        names = zip(seen.code.co_freevars, function.__closure__ or (), strict=True)
        yield from (cell for name, cell in names if name in stores)


def _holding(codes: Sequence[CodeType]) -> Iterable[Any]:
    """Return objects among which are all that hold one of these codes."""
    see_frozen()
    if len(codes) < _MANY:
        return gc.get_referrers(*codes) if codes else ()
    return gc.get_objects()  # looking for each of them in all that is held would take seconds


def see_frozen() -> None:
    """Let Python's collector see what a user has frozen (`gc.freeze`): it finds nothing there."""
    if gc.get_freeze_count():
        gc.unfreeze()


def look_up(seen: Iterable[Seen], copies: Mapping[int, Any]) -> None:
    """Find the functions of these codes, and remember them."""
    for _ in _functions(seen, copies, are_known=False):
        pass


class Known:
    """The functions of a code that ran. The code is kept alive: ids are used again."""

    def __init__(self, seen: Seen, functions: Iterable[FunctionType]) -> None:
        self.code, self._functions = seen.code, [*map(weakref.ref, functions)]
        self._seen = weakref.ref(seen)  # in one recording
        self.holders = 0  # of the code, when these were all of its functions

    @property
    def functions(self) -> list[FunctionType]:
        """Those that are there still."""
        alive = [function for ref in self._functions if (function := ref()) is not None]
        return [function for function in alive if function.__code__ is self.code]

    def are_all(self, seen: Seen) -> bool:
        """Whether there can be no other function by now."""
        # Between two recordings, another function may take the place of another holder.
        if self._seen() is not seen or _holders(seen) > self.holders:
            return False
        return len(self.functions) == len(self._functions)


_known: dict[int, Known] = {}
_MOST = 20_000
_MANY = 50  # codes to look for; each adds to the time in which Python finds who holds them


def _of_the_code(seen: Seen) -> list[FunctionType]:
    """Return the functions of a code that are known, and there still."""
    return [f for f in _known[id(seen.code)].functions if f.__globals__ is seen.globals]


def _holders(seen: Seen) -> int:
    return sys.getrefcount(seen.code)


def _is_known(seen: Seen) -> bool:
    known = _known.get(id(seen.code))
    return known is not None and known.are_all(seen)


def function_named(seen: Seen) -> FunctionType | None:
    """Return the function that goes by the name of a code in its module or its classes."""
    name = seen.code.co_name
    owners = [vars(kind) for owner in seen.owners for kind in owner.__mro__]
    for table in (seen.globals, *owners):
        value = unbound(table.get(name))
        if isinstance(value, FunctionType) and value.__code__ is seen.code:
            return value
    return None


def unbound(value: Any) -> Any:
    """Return the function that a class or a module has in a wrapping of Python's own."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return value


def _has_run(
    function: FunctionType,
    then: tuple[int, ...],
    copies: Mapping[int, Any],
    set_cells: Container[int],
) -> bool:
    """Whether a function, or one that was made of it for a copy, ran with these free variables.

    One that may have been set meanwhile tells nothing.
    """
    for held, cell in zip(then, function.__closure__ or (), strict=True):
        value = cell_content(cell)
        is_as_then = id(value) == held or copies.get(held, ABSENT) is value
        if not is_as_then and id(cell) not in set_cells:
            return False
    return True
