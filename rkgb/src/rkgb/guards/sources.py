"""The places outside of a call that functions read: variables, cells, defaults, modules.

They are found from the functions that ran (`CodeWatch`). Nothing of the copy of a module that runs
is among them: where a function holds a copy, the user's function that it was made of counts.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from rkgb.guards.code_watch import Seen
from rkgb.guards.entries import ABSENT
from rkgb.guards.loads import loads_of
from rkgb.guards.watched import Watched


@dataclass(frozen=True, slots=True)
class Source:
    """A place that can be read again, and in words which, and where it was read."""

    owner: Any  # the variables of a module, a cell, or a function
    name: str
    told: str
    where: str  # file.py:12

    @property
    def key(self) -> tuple[int, str]:
        """What tells it from others; the owner is alive."""
        return id(self.owner), self.name

    def read(self) -> Any:
        """Return what is there now, or `ABSENT`."""
        if isinstance(self.owner, dict):
            return self.owner.get(self.name, ABSENT)
        if isinstance(self.owner, CellType):
            try:
                return self.owner.cell_contents
            except ValueError:
                return ABSENT
        return getattr(self.owner, self.name)

    def watch(self, watched: Watched, value: Any) -> None:
        """Look from now on whether it is the same object still."""
        if isinstance(self.owner, dict):
            watched.entries(self.owner).note(self.name, value)
        elif isinstance(value, Tensor):
            known = id(value)  # it is not kept alive; that it lives is checked beside this
            watched.checks.append(lambda: id(self.read()) == known)
        else:
            watched.checks.append(lambda: self.read() is value)


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

    @classmethod
    def of(cls, seen: Iterable[Seen], copies: Mapping[int, Any] | None = None) -> Sources:
        """Return what these functions read; `copies` are of the user's objects, by identity."""
        found, known = cls(), list(seen)
        for one in known:
            loads = loads_of(one.code)
            for name in loads.attributes:
                found.asked[name] = found.asked.get(name, frozenset()) | one.paths
            for name, line in (*loads.globals.items(), *loads.stores.items()):
                if name in one.globals:
                    told = f"global '{name}' of {one.globals.get('__name__', 'a module')}"
                    found._add(Source(one.globals, name, told, _line(one.code, line)), one.paths)
                    if _reads_environment(one.globals[name], loads.attributes):
                        found._add(_environment(_line(one.code, line)), one.paths)
            for name, line in loads.imports.items():
                if name in sys.modules:
                    told = f"module '{name}'"
                    found._add(Source(sys.modules, name, told, _line(one.code, line)), one.paths)
        for one, function in _functions(known, copies or {}):
            found._add_function(one, function, copies or {})
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

    def _add(self, source: Source, paths: Iterable[str]) -> None:
        self.places.setdefault(source.key, source)
        self.paths[source.key] = self.paths.get(source.key, frozenset()) | frozenset(paths)

    def _add_function(self, seen: Seen, function: FunctionType, copies: Mapping[int, Any]) -> None:
        name, loads = function.__qualname__, loads_of(seen.code)
        for free, cell in zip(seen.code.co_freevars, function.__closure__ or (), strict=True):
            source = Source(cell, "", f"variable '{free}' around {name}", "")
            if free in loads.free or free in loads.stores:
                line = loads.free.get(free) or loads.stores.get(free, 0)
                source = Source(cell, "", source.told, _line(seen.code, line))
                if id(source.read()) not in copies:
                    self._add(source, seen.paths)
        for kind in ("__defaults__", "__kwdefaults__"):
            if getattr(function, kind):
                told = f"the defaults of {name}"
                where = _line(seen.code, seen.code.co_firstlineno)
                self._add(Source(function, kind, told, where), seen.paths)


def _reads_environment(value: Any, attributes: Container[str]) -> bool:
    asks = "environ" in attributes or "getenv" in attributes
    return value is os.environ or value is os.getenv or (value is os and asks)


def _environment(where: str) -> Source:
    return Source(vars(os.environ), "_data", "environment of the process", where)


def _line(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename).name}:{line}"


def _functions(
    seen: Iterable[Seen], copies: Mapping[int, Any]
) -> Iterator[tuple[Seen, FunctionType]]:
    """Yield the function objects behind the codes that have free variables or may have defaults.

    Most are found where their name is. Looking through everything that Python keeps takes some
    milliseconds, once for all others.
    """
    others: dict[int, list[Seen]] = {}
    for one in seen:
        code = one.code
        if code.co_name.endswith(("comp>", "genexpr>")):  # made where it ran
            continue
        named = None if code.co_freevars else function_named(one)
        if named is not None:
            yield one, named
        elif code.co_freevars or code.co_argcount or code.co_kwonlyargcount:
            others.setdefault(id(code), []).append(one)
    found: dict[int, list[FunctionType]] = {}
    codes = [entries[0].code for entries in others.values()]
    for function in gc.get_referrers(*codes) if codes else ():
        if isinstance(function, FunctionType) and id(function.__code__) in others:
            found.setdefault(id(function.__code__), []).append(function)
    for key, entries in others.items():
        for one in entries:
            ours = [f for f in found.get(key, ()) if f.__globals__ is one.globals]
            # A variable that was set meanwhile holds something else; then all of them count.
            ran = [f for f in ours if _has_run(f, one, copies)] or ours
            yield from ((one, function) for function in ran)


def function_named(seen: Seen) -> FunctionType | None:
    """Return the function that goes by the name of a code in its module or its classes."""
    name = seen.code.co_name
    owners = [vars(kind) for owner in seen.owners for kind in owner.__mro__]
    for table in (seen.globals, *owners):
        value = table.get(name)
        value = getattr(value, "__func__", value)
        if isinstance(value, FunctionType) and value.__code__ is seen.code:
            return value
    return None


def _has_run(function: FunctionType, seen: Seen, copies: Mapping[int, Any]) -> bool:
    """Whether a function, or one that was made of it for a copy, is one of those that ran."""
    contents = [Source(cell, "", "", "").read() for cell in function.__closure__ or ()]
    return not contents or any(
        all(
            id(value) == held or copies.get(held, ABSENT) is value
            for held, value in zip(then, contents, strict=True)
        )
        for then in seen.free
    )
