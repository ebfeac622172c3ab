"""Which functions run, in which submodules: seen as they start.

From Python 3.12 on `sys.monitoring` says so; before, a trace function does that looks at calls only
and follows no line. What is written in C is seen by a profile function, as it is called.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib.abc
import importlib.machinery
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from importlib.machinery import ModuleSpec
from types import CodeType, FrameType
from typing import Any

from rkgb.guards.doors import Door, door_of, is_of_library, says, told
from rkgb.guards.loads import ANY, OWN
from rkgb.guards.owners import is_ours, is_users
from rkgb.torch_api.patches import Patches
from rkgb.torch_api.quiet import set_profile

_active = threading.local()  # with `watches` of a thread, the last one at the end
_TOOLS = (4, 3)  # numbers that `sys.monitoring` reserves for nobody


# Functions of libraries that read what changes with the process, and call nothing for it.
_ASKING = {id(f.__code__): f.__name__ for f in (threading.active_count, threading.enumerate)}
_IMPORTS = importlib.import_module.__code__
_LOGGERS = logging.getLogger.__code__


@dataclass
class Seen:
    """A function that has run."""

    code: CodeType
    globals: dict[str, Any]
    paths: set[str] = field(default_factory=set)  # of the submodules that it ran in
    # What its free variables held when it started, by identity: it must not be kept alive.
    free: set[tuple[int, ...]] = field(default_factory=set)
    owners: set[type] = field(default_factory=set)  # types of its first argument
    # Of attributes, that it made while it ran, also with `OWN` before it if it asks itself.
    names: set[str] = field(default_factory=set)
    imports: set[str] = field(default_factory=set)  # modules that it imported by a name it made
    loggers: set[str] = field(default_factory=set)  # that it got by their names
    outside: dict[str, None] = field(default_factory=dict)  # what it asks the system for, in words
    says: set[str] = field(default_factory=set)  # names of functions that say how torch is set

    def add(self, other: Seen) -> None:
        """Take in what was seen of the same function elsewhere."""
        for own in fields(self)[2:]:  # behind the code and its variables
            getattr(self, own.name).update(getattr(other, own.name))


_LOADERS = importlib.abc.FileLoader, importlib.machinery.ExtensionFileLoader


class _Finder(importlib.abc.MetaPathFinder):
    """Imports modules of torch and the user's, and what they import, while `watch` rests.

    A compiler keeps the builtins that it finds, and what runs once is no decision of a forward.
    """

    def __init__(self, watch: CodeWatch) -> None:
        self._watch: CodeWatch | None = watch

    def end(self) -> None:
        """Keep nothing: modules that were found, and perhaps not imported yet, keep this."""
        self._watch = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        watch = self._watch
        if watch is None or not (fullname.startswith("torch.") or is_users(fullname)):
            return None
        others = [getattr(f, "find_spec", None) for f in sys.meta_path if type(f) is not _Finder]
        with watch.importing():
            specs = (find(fullname, path, target) for find in others if find is not None)
            spec = next(filter(None, specs), None)
        loader: Any = None if spec is None else spec.loader
        if isinstance(loader, _LOADERS):  # one for each module
            written = loader.exec_module

            def execute(module: Any) -> None:
                vars(loader).pop("exec_module", None)
                watch = self._watch
                if watch is None:
                    written(module)
                    return
                around = watch.around_import if is_users(fullname) else contextlib.nullcontext
                with watch.importing(), around(fullname):
                    written(module)

            vars(loader)["exec_module"] = execute
        return spec


@contextlib.contextmanager
def nothing_watched() -> Iterator[None]:
    """While active, no watch of this thread notes what starts: it is ours, and takes long."""
    watches: list[CodeWatch] = getattr(_active, "watches", [])
    with contextlib.ExitStack() as stack:
        for watch in reversed(watches):
            if not watch.is_paused:
                stack.enter_context(watch.resting())
        yield


_USERS = Seen((lambda: None).__code__, {})  # stands for all that is the user's


class CodeWatch:
    """While active, notes which functions start on this thread: the user's, and apart libraries'.

    `path` gives the submodule that runs. `first` is called before a function of the user runs for
    the first time, and again where its variables around it or the type of its first argument are
    others. Another thread counts where `elsewhere` says so, from Python 3.12 on.
    """

    def __init__(
        self,
        path: Callable[[], str],
        first: Callable[[Seen, FrameType], None] = lambda _seen, _frame: None,
        elsewhere: Callable[[], bool] = lambda: False,
    ) -> None:
        self._path, self._first, self._elsewhere = path, first, elsewhere
        self.seen: dict[tuple[int, int], Seen] = {}  # by code and module, by identity
        self.library: dict[int, Seen] = {}  # by code; what nobody changes is seen, too
        # Whose code it is; kept alive, as ids are used again. None: nobody's that counts.
        self._kinds: dict[int, tuple[CodeType, Seen | None]] = {}
        self._thread = 0
        self.trace: Any = None  # functions that may rest while nothing of the user's runs
        self.profile: Any = None
        self.is_paused = self._rests = False
        self._leave: Callable[[], None] = lambda: None
        self._named = Patches([(builtins, n, self._noting(n)) for n in ("getattr", "hasattr")])
        self.around_import: Callable[[str], contextlib.AbstractContextManager[Any]] = (
            contextlib.nullcontext
        )

    def __enter__(self) -> CodeWatch:
        self._thread = threading.get_ident()
        for callback in gc.callbacks:  # Python's collector calls them at any time
            code = getattr(callback, "__code__", None)
            if code is not None:
                self._kinds[id(code)] = code, None
        self._watch_starts()
        self._profile()
        self._named.__enter__()
        self._finder = _Finder(self)
        sys.meta_path.insert(0, self._finder)
        vars(_active).setdefault("watches", []).append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active.watches.remove(self)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._finder.end()
        self._named.__exit__()
        if self.profile is not None:
            set_profile(self._profiled)
            self.profile = None
        self._leave()

    def pause(self) -> None:
        """Note nothing until it is to `go_on`: what runs is nothing of the user's, and takes time.

        Only a trace function that stood before runs on.
        """
        self.is_paused = True
        if self.profile is not None:
            sys.setprofile(None)
        if self.trace is not None:
            sys.settrace(None)

    def go_on(self) -> None:
        """Note again what starts."""
        if self.trace is not None:
            sys.settrace(self.trace)
        if self.profile is not None:
            sys.setprofile(self.profile)
        self.is_paused = False

    def importing(self) -> contextlib.AbstractContextManager[Any]:
        """Around an import: it notes nothing, and finds Python's own builtins."""
        return self._named.undone() if self.is_paused else self.resting()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """While active, note nothing: frames that are traced hold their arguments to the end."""
        if self._rests:
            yield
            return
        self._rests = True
        self._leave()
        is_ours = self.profile is not None and sys.getprofile() is self.profile
        if is_ours:
            set_profile(self._profiled)
        try:
            with self._named.undone():
                yield
        finally:
            if is_ours:
                sys.setprofile(self.profile)
            self._watch_starts()
            self._rests = False

    @contextlib.contextmanager
    def apart(self) -> Iterator[list[Seen]]:
        """While active, note what starts by itself; the list that is yielded gets it in the end."""
        found: list[Seen] = []
        before, self.seen = self.seen, {}
        try:
            yield found
        finally:
            found += self.seen.values()
            self.seen = before

    def like_it(self) -> CodeWatch:
        """Return another one, of which nothing becomes a guard."""
        return CodeWatch(self._path, self._first)

    def add(self, others: Iterable[Seen]) -> None:
        """Note what was noted apart."""
        for other in others:
            self.seen.setdefault((id(other.code), id(other.globals)), other).add(other)

    def _watch_starts(self) -> None:
        if sys.version_info < (3, 12) or not self._monitor():
            self._trace()

    def _start(self, code: CodeType, frame: FrameType) -> bool:
        """Note that a function starts; whether others of its code count."""
        known = self._kinds.get(id(code))
        if known is None:
            known = self._kinds[id(code)] = code, self._kind(code, frame)
        _, library = known
        if library is None:
            return False
        if library.code is code:
            library.paths.add(self._path())
            if (code is _IMPORTS or code is _LOGGERS) and (
                seen := self._reader(Door.NAMES, frame.f_back)
            ):
                named = seen.imports if code is _IMPORTS else seen.loggers
                named.add(str(frame.f_locals.get("name") or ""))
            elif (name := _ASKING.get(id(code))) and (
                seen := self._reader(Door.SYSTEM, frame.f_back)
            ):
                seen.outside[f"'{name}' of threads"] = None
        else:
            self._note(code, frame)
        return True

    def _kind(self, code: CodeType, frame: FrameType) -> Seen | None:
        """Return what there is to note of a code: of the user's, what stands for all of them."""
        name = frame.f_globals.get("__name__")
        if is_users(name):
            return None if code.co_filename.startswith("<frozen") else _USERS
        if is_ours(name):
            return None
        return self.library.setdefault(id(code), Seen(code, frame.f_globals))

    def _note(self, code: CodeType, frame: FrameType) -> None:
        key = id(code), id(frame.f_globals)
        seen, is_new = self.seen.get(key), False
        if seen is None:
            seen, is_new = Seen(code, frame.f_globals), True
            self.seen[key] = seen
        if code.co_freevars or code.co_argcount:
            values = frame.f_locals
            if code.co_freevars:
                free = tuple(id(values.get(name)) for name in code.co_freevars)
                is_new |= free not in seen.free
                seen.free.add(free)
            if code.co_argcount:
                owner = type(values.get(code.co_varnames[0]))
                is_new |= owner not in seen.owners
                seen.owners.add(owner)
        if is_new:
            self._first(seen, frame)
        seen.paths.add(self._path())

    # ------------------------------------------------------------------ what is written in C

    def _profile(self) -> None:
        before = self._profiled = sys.getprofile()
        handed_on = before if callable(before) else None  # one that is written in C waits

        def profile(frame: FrameType, event: Any, called: Any) -> None:
            if event == "c_call" and not is_of_library(frame, called):
                door = door_of(called)
                seen = None if door is None else self._reader(door, frame)
                if door is not None and seen is not None:
                    self._came_through(door, seen, called, frame.f_lineno)
            if handed_on is not None:
                handed_on(frame, event, called)

        self.profile = profile
        sys.setprofile(profile)

    def _noting(self, name: str) -> Callable[..., Any]:
        original = getattr(builtins, name)

        def ask(owner: Any, attribute: str, *default: Any) -> Any:
            frame = sys._getframe(2)
            seen = self._reader(Door.NAMES, frame)
            if seen is not None:
                seen.names.add(attribute)
                if seen.code is frame.f_code:
                    seen.names.add(OWN + attribute)
            return original(owner, attribute, *default)

        return ask

    def _reader(self, door: Door, frame: FrameType | None) -> Seen | None:
        """Return the function of the user that something is read for; None if it is not watched."""
        reader = door.reader(frame)
        return None if reader is None else self.seen.get((id(reader.f_code), id(reader.f_globals)))

    def _came_through(self, door: Door, seen: Seen, called: Any, line: int) -> None:
        if door is Door.NAMES:
            seen.names.add(ANY)
        elif door is not Door.TORCH:
            seen.outside[told(called, line)] = None
        elif says(called.__name__) is not None:
            seen.says.add(called.__name__)

    # ------------------------------------------------------------------ before Python 3.12

    def _trace(self) -> None:
        before = sys.gettrace()

        def trace(frame: FrameType, event: Any, arg: Any) -> Any:
            self._start(frame.f_code, frame)
            return None if before is None else before(frame, event, arg)

        def leave() -> None:
            sys.settrace(before)
            self.trace = None

        self._leave, self.trace = leave, trace if before is None else None
        sys.settrace(trace)

    # ------------------------------------------------------------------ from Python 3.12 on

    def _monitor(self) -> bool:
        """Ask `sys.monitoring`; return False where others have taken all its places."""
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        tool = next((t for t in _TOOLS if monitoring.get_tool(t) is None), None)
        if tool is None:
            return False
        starts = monitoring.events.PY_START

        def start(code: CodeType, _offset: int) -> Any:
            if self.is_paused or (threading.get_ident() != self._thread and not self._elsewhere()):
                return None
            return None if self._start(code, sys._getframe(1)) else monitoring.DISABLE

        def leave() -> None:
            if monitoring.get_tool(tool) != "rockmate":
                return
            monitoring.set_events(tool, 0)
            monitoring.register_callback(tool, starts, None)
            monitoring.free_tool_id(tool)

        monitoring.use_tool_id(tool, "rockmate")
        self._leave = leave
        monitoring.register_callback(tool, starts, start)
        monitoring.set_events(tool, starts)
        return True
