"""What a forward changes outside of its module, or uses up: found, said where, and undone.

Before a function of the user runs for the first time, what it leads to is kept; a copy takes the
place of what changes by being used. Afterwards everything is compared, and put back.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextvars import copy_context
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from rkgb.errors import NoStepError, SideEffectError, in_module
from rkgb.guards.code_watch import Seen
from rkgb.guards.entries import cell_content
from rkgb.guards.holding import CACHED
from rkgb.guards.loads import loads_of
from rkgb.guards.owners import is_users
from rkgb.guards.sources import Source, Sources, function_named, see_frozen, unbound
from rkgb.outside.contents import Contents
from rkgb.outside.held import OF_MODULE, has_content
from rkgb.outside.identities import identities_asked, identity, set_and_read
from rkgb.outside.known import (
    add_known,
    forget_stand_ins,
    has_stand_ins,
    itself,
    put_back_from_now_on,
    put_back_what_leads,
    relied_on,
    remembering,
)
from rkgb.outside.reached import Reached
from rkgb.outside.used_up import is_used_up

_LOOKS_UP = "looks up its own modules, or what they hold, in what"


class Outside:
    """What the functions that run lead to, as it was before.

    `copy_of` returns the copy of what a module holds, of which `twin` is a copy: where the module
    is known outside of it, copies are lent while the twin runs. If it `takes_parameters` as
    arguments, any that is kept outside may be one of these.
    """

    def __init__(
        self,
        twin: nn.Module,
        copy_of: Callable[[Any], Any] | None = None,
        *,
        takes_parameters: bool = False,
    ) -> None:
        self.contents = Contents(copy_of)
        self.held = Contents()  # of the copy of the module
        self._context = copy_context()
        self.remembers = False  # whether functions have new results, which later calls read
        self.ran_for_results: list[Seen] = []  # when planning computed what is remembered
        self._takes_parameters = takes_parameters
        self._twin, self._inside = twin, {*map(id, twin.modules())}
        self._paths: dict[int, tuple[str, str]] = {}  # of owners: module, and attribute
        self._direct: set[int] = set()  # containers that are attributes themselves
        self._local: set[int] = set()  # codes of functions that are made while it runs
        # Names of attributes: what of libraries functions that ran may have given them, and told.
        self._set_on: dict[str, dict[int, str]] = {}
        for path, module in twin.named_modules():
            for name, value in vars(module).items():
                if name not in OF_MODULE and value is not None:
                    reached = Reached(frozenset(), self._inside)
                    reached.add(value)
                    if has_content(value):
                        self._direct.add(id(value))
                    for key, owner in reached.owners.items():
                        self._paths.setdefault(key, (path, name))
                        self.held.add(owner, lends=False)
                        if isinstance(owner, (FunctionType, ModuleType, type)):
                            self.contents.add(owner, lends=False)  # no copy has its own

    def note(self, seen: Seen, frame: FrameType) -> None:
        """Keep what a function leads to that is about to run for the first time."""
        code, loads = seen.code, loads_of(seen.code)
        self._refuse_defaults(seen, frame)
        reached = Reached(frozenset(loads.attributes), self._inside, loads.sets)
        for name in (*loads.globals, *loads.stores):
            if name in seen.globals or (name in loads.stores and name not in code.co_freevars):
                self.contents.add(seen.globals, name)
                reached.add(seen.globals.get(name))
        if code.co_freevars and id(code) not in self._local:
            values = frame.f_locals
            for name in code.co_freevars:
                reached.add(values.get(name))
            of_cells = reached.used or reached.closed
            if of_cells or not loads.stores.keys().isdisjoint(code.co_freevars):
                for cell in _cells(seen, values):
                    self.contents.add(cell)
        named_so = [seen.globals.get(code.co_name)]  # or what remembers for it
        if code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            seen.owners.add(type(owner))
            for kind in type(owner).__mro__:
                reached.add(kind)
                named_so.append(unbound(vars(kind).get(code.co_name)))
        named = function_named(seen)
        for function in _with_defaults(code, frame) if named is None else (named,):
            reached.add(function.__defaults__)
            reached.add(function.__kwdefaults__)
        for owner in reached.owners.values():
            if id(owner) not in self._paths:
                self.contents.add(owner)
        for owner in reached.of_libraries.values():
            table = owner if isinstance(owner, type) else vars(owner)
            for name in loads.sets:
                self.contents.add(table, name)
                self._set_on.setdefault(name, {})[id(table)] = _told(owner)
        self._note_caches((*reached.caches, *named_so))
        self._local.update(id(c) for c in code.co_consts if hasattr(c, "co_code"))

    def _note_caches(self, caches: Iterable[Any]) -> None:
        """Know what functions remember before they run."""
        kept = (c for c in caches if type(c) is CACHED and is_users(c.__module__))
        new = [cached for cached in kept if id(cached) not in self.contents.caches]
        forget_stand_ins(new)
        self.contents.add_caches(new)
        remembering.update(new)

    def _refuse_defaults(self, seen: Seen, frame: FrameType) -> None:
        """Refuse a default that changes by being used, which the frame has got already.

        Raises:
            SideEffectError: with its name.
        """
        code = seen.code
        names, values = _arguments(code), frame.f_locals
        used = {id(v): n for n in names if is_used_up(v := values.get(n))}
        functions = [*_functions_of(code)] if used else []
        defaults = [f.__defaults__ or () for f in functions]
        defaults += [tuple((f.__kwdefaults__ or {}).values()) for f in functions]
        for value in (value for own in defaults for value in own if id(value) in used):
            raise SideEffectError.to_capture(
                type(self._twin).__name__,
                "pass it as an argument, or take it from a variable",
                f"'{used[id(value)]}' of {code.co_name} ({_line(code)}) is by default a "
                f"{type(value).__name__}, which a recording would use up",
            )

    def remember(self) -> None:
        """From now on, `OutsideState` puts back what has changed, or changes by being used."""
        put_back_from_now_on((*self.contents.changed(), *self.contents.used_up()))

    @contextlib.contextmanager
    def knowing_the_module(self) -> Iterator[None]:
        """While active, no copies are lent: an observer hook sets what it sets in every step."""
        copy_of, self.contents.copy_of = self.contents.copy_of, None
        try:
            yield
        finally:
            self.contents.copy_of = copy_of

    def begin(self) -> Outside:
        """Lend copies in the places that are known: parts that run whole put back what is there."""
        add_known(self.contents, lends=True)
        return self

    def close(self) -> None:
        """Put everything back."""
        put_back_from_now_on(self.contents.lent())
        self.contents.restore()

    def refuse(self, seen: Collection[Seen], copies: Mapping[int, Any]) -> None:
        """Refuse what changes something, or uses it up.

        Raises:
            SideEffectError: with the module, and the line.
            NoStepError: planning could not put it back.
        """
        self._refuse_first(
            self.reasons([*seen], copies),
            "pass what it gives as an argument, or do it outside of forward",
            "which a recording would not do again",
        )
        if not any(has_stand_ins(cached) for cached, _ in self.contents.caches.values()):
            ran = [cached for cached, _ in self._caches_of(seen)]
            self.remembers |= any(map(self.contents.new_results, ran))
            for cached in ran:
                relied_on.setdefault(cached, ([*seen], self.contents.new_results(cached)))
            for cached, _ in self.contents.caches.values():
                self.ran_for_results += relied_on.get(cached, ((), ()))[0]
            self.contents.keep_results(relied_on)

    def refuse_read_elsewhere(
        self, names: Collection[tuple[str, str]], seen: list[Seen], copies: Mapping[int, Any]
    ) -> None:
        """Refuse a forward that sets attributes, and may read them by another way than self.

        Raises:
            SideEffectError: with the module, and the line.
        """
        modules = dict(self._twin.named_modules())
        own: dict[int, set[str]] = {}
        for path, name in names:
            own.setdefault(identity(copies.get(id(modules[path]))), set()).add(name)
        if own:
            found = set_and_read(seen, copies, self._inside, own)
            self._refuse_first(found, "take attributes from self", "where it would not be seen")

    def _refuse_first(self, found: Iterable[tuple[str, str]], remedy: str, why: str) -> None:
        """Refuse the first submodule, if there is one, with what its forward does in words."""
        for path, text in found:
            raise SideEffectError.to_capture(
                type(self._twin).__name__,
                remedy,
                f"its forward {text}, {why}",
                in_module(path),
                module_path=path,
            )

    def _caches_of(self, seen: Iterable[Seen]) -> Iterator[tuple[Any, Seen]]:
        """Yield functions that remember, each with what of it ran.

        What ran inside of a part that runs whole is none: each step runs it.
        """
        ran = {id(one.code): one for one in seen}
        for cached, _ in self.contents.caches.values():
            if one := ran.get(id(getattr(cached.__wrapped__, "__code__", None))):
                yield cached, one

    def _of_caches(self, seen: Iterable[Seen]) -> Iterator[tuple[str, str]]:
        """Yield functions that remember by what is another object in each call, or copy."""
        for cached, one in self._caches_of(seen):
            parts = self.contents.new_results(cached)
            for part in parts:  # grows while it is walked
                if isinstance(part, (nn.Module, Tensor)) or id(part) in self._paths:
                    told = f"'{cached.__name__}' ({_line(one.code)})"
                    yield max(one.paths), f"calls {told}, which remembers by tensors or objects"
                    break
                parts += part if isinstance(part, tuple) else ()

    def _of_context(self) -> Iterator[tuple[str, str]]:
        """Yield variables of the context that libraries set, such as numpy's for its errors.

        What had neither value nor default is made at first use.
        """
        for variable, value in copy_context().items():
            if not self.contents.knows(variable):
                with contextlib.suppress(LookupError):
                    if self._context.run(variable.get) is not value:
                        yield "", f"sets the context variable '{variable.name}'"

    def changed_of_module(self) -> Iterator[tuple[Any, Mapping[Any, Any] | None, str]]:
        """Yield what the module leads to and holds otherwise: with what it held, and the path."""
        changed = {id(owner) for owner, _ in self.held.changed()}
        for owner, content in self.held.held():
            if id(owner) in changed:
                has_places = isinstance(content, dict) and type(owner).__module__ != "weakref"
                has_places = has_places and not isinstance(owner, type)
                known = content if has_places else None
                yield owner, known, self._paths[id(owner)][0]

    def reasons(
        self, seen: list[Seen], copies: Mapping[int, Any], *, of_piece: bool = False
    ) -> list[tuple[str, str]]:
        """Return what is changed or used up, all of which is put back from then on."""
        return [*self._reasons(seen, copies, of_piece=of_piece)]

    def _reasons(
        self, seen: list[Seen], copies: Mapping[int, Any], *, of_piece: bool
    ) -> Iterator[tuple[str, str]]:
        """Yield what is changed or used up: the submodule, and the words for it.

        What a recomputation of a piece finds again does not count there.
        """
        sources = Sources.of(seen, copies)
        for one in seen:
            yield from ((max(one.paths), f"reads {text}") for text in one.outside)
        for variable in self.contents.given_for_good():
            where = [one.where for one in sources.places.values() if one.read() is variable]
            raise NoStepError.to_capture(
                type(self._twin).__name__,
                f"give the context variable '{variable.name}' a default, or set it before",
                "its forward sets this variable, which has no value so far: planning, which runs "
                "the forward more than once, could not take it away again",
                ", ".join(where),
            )
        changed = [*self.contents.changed()]
        put_back_from_now_on(changed)
        owners = {(id(owner), name) for owner, name in changed}
        # What runs whole looks its own modules up; a recording's are copies.
        own = frozenset() if of_piece else frozenset(map(identity, copies.values()))
        for key, source in sources.places.items():
            reached, value = Reached(sources.attributes, self._inside), source.read()
            reached.add(value)
            text = ""
            if {(id(source.owner), None), (id(source.owner), source.name)} & owners:
                text = f"sets the {source.told}"
            elif any((id(owner), None) in owners for owner in reached.owners.values()):
                text = f"changes what the {source.told} leads to"
                if not isinstance(value, nn.Module):
                    put_back_what_leads(key, source, sources.attributes)
            elif reached.used:
                text = f"uses the {source.told} ({_kinds(reached)})"
                self._keep(source, reached)
                put_back_what_leads(key, source, sources.attributes)
            elif reached.long:
                text = f"reads the {source.told}, which is too long to be compared at every call"
            elif own and any(self._is_own(k, own) for k in reached.keys):
                text = f"{_LOOKS_UP} the {source.told} leads to"
            if text:
                yield max(sources.paths[key]), f"{text} ({source.where})"
        paths = {path for one in seen for path in one.paths}
        yield from self._of_libraries(seen, owners)
        yield from self._of_classes(sources, paths, owners, own)
        yield from self._of_caches(seen)
        if seen:  # what runs whole sets them in every step
            yield from self._of_context()
        if of_piece:
            yield from self._of_modules(sources, paths, self._direct)
        else:
            yield from identities_asked(seen, copies, self._inside, own, self._is_own)
            # A forward may reach into any module, also one that it does not call.
            every = {path for path, _ in self._twin.named_modules()}
            yield from self._of_modules(sources, every, frozenset())

    def _of_libraries(
        self, seen: Iterable[Seen], owners: Collection[tuple[int, str | None]]
    ) -> Iterator[tuple[str, str]]:
        """Yield what is a library's and has been given another attribute."""
        for one in seen:
            for name, line in loads_of(one.code).sets.items():
                for key, told in self._set_on.get(name, {}).items():
                    if (key, name) in owners:
                        where = f"{Path(one.code.co_filename).name}:{line}"
                        yield max(one.paths), f"sets '{name}' of {told} ({where})"

    def _is_own(self, value: Any, own: Container[int]) -> bool:
        """Whether a value may be the module's own, or an argument, while a copy runs on others."""
        if self.contents.is_lent(value):
            return False
        if isinstance(value, Tensor):
            return self._takes_parameters or not isinstance(value, nn.Parameter)
        return identity(value) in own

    def _keep(self, source: Source, reached: Reached) -> None:
        """Remember where something is that changes by being used."""
        name = None if isinstance(source.owner, CellType) else source.name
        for owner, own in ((source.owner, name), *((o, None) for o in reached.owners.values())):
            if isinstance(owner, FunctionType) and own is not None:
                continue  # defaults, whose frame has them already
            if isinstance(owner, (dict, list, CellType)) or hasattr(owner, "__dict__"):
                put_back_from_now_on([(owner, own)])

    def _of_classes(
        self,
        sources: Sources,
        paths: set[str],
        owners: Collection[tuple[int, str | None]],
        own: Collection[int],
    ) -> Iterator[tuple[str, str]]:
        kinds: dict[type, str] = {}
        for path, module in self._twin.named_modules():
            for kind in type(module).__mro__ if path in paths else ():
                if owners or is_users(kind.__module__):
                    kinds.setdefault(kind, path)
        for kind, path in kinds.items():
            reached = Reached(sources.attributes)
            reached.add(kind)
            if own and any(self._is_own(key, own) for key in reached.keys):
                yield path, f"{_LOOKS_UP} the class {kind.__qualname__} leads to"
            if any((id(owner), None) in owners for owner in reached.owners.values()):
                source = Source(partial(itself, kind), "", "", "")
                put_back_what_leads((id(kind), None), source, sources.attributes)
                yield path, f"changes what the class {kind.__qualname__} leads to"

    def _of_modules(
        self, sources: Sources, paths: set[str], passed: Collection[int]
    ) -> Iterator[tuple[str, str]]:
        for owner, _ in self.held.changed():
            if id(owner) in passed:
                continue
            path, name = self._paths[id(owner)]
            if path in paths:
                yield path, f"changes what attribute '{name}' leads to ({type(owner).__name__})"
        for path, module in self._twin.named_modules():
            for name, value in vars(module).items() if path in paths else ():
                if name in sources.attributes and name not in OF_MODULE:
                    reached = Reached(sources.attributes)
                    reached.add(value)
                    if reached.used:
                        yield path, f"uses attribute '{name}' ({_kinds(reached)})"
                    elif reached.long:
                        yield path, f"reads attribute '{name}', too long to be compared at calls"


def _kinds(reached: Reached) -> str:
    return ", ".join(dict.fromkeys(type(value).__name__ for value in reached.used))


def _cells(seen: Seen, values: Mapping[str, Any]) -> Iterator[CellType]:
    """Yield the cells of the functions behind a code whose variables hold these values."""
    for function in _functions_of(seen.code):
        cells = function.__closure__ or ()
        names = seen.code.co_freevars
        held = map(cell_content, cells)
        if all(v is values.get(n, v) for n, v in zip(names, held, strict=True)):
            yield from cells


def _told(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{'' if kind is owner else 'a '}{kind.__module__}.{kind.__qualname__}"


def _line(code: CodeType) -> str:
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def _arguments(code: CodeType) -> tuple[str, ...]:
    """Return the arguments that may have defaults: not what a comprehension goes through."""
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return names if names != (".0",) else ()


def _with_defaults(code: CodeType, frame: FrameType) -> Iterator[FunctionType]:
    """Yield the functions behind a code, if an argument may be a default that is written to."""
    values = frame.f_locals
    if any(has_content(values.get(name)) for name in _arguments(code)):
        yield from _functions_of(code)


def _functions_of(code: CodeType) -> Iterator[FunctionType]:
    see_frozen()
    for function in gc.get_referrers(code):
        if isinstance(function, FunctionType) and function.__code__ is code:
            yield function
