"""Which functions of the user run, in which submodules: seen as they start.

From Python 3.12 on `sys.monitoring` says so, and says it once of what is nobody's; before, a trace
function does that looks at calls only and follows no line.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from rkgb.guards.owners import is_users

_TOOLS = (4, 3)  # numbers that `sys.monitoring` reserves for nobody


@dataclass(slots=True)
class Seen:
    """A function that has run."""

    code: CodeType
    globals: dict[str, Any]
    paths: set[str] = field(default_factory=set)  # of the submodules that it ran in
    # What its free variables held when it started, by identity: it must not be kept alive.
    free: set[tuple[int, ...]] = field(default_factory=set)
    owners: set[type] = field(default_factory=set)  # types of its first argument


class CodeWatch:
    """While active, notes which functions of the user start on this thread.

    `path` gives the submodule that runs. `first` is called before a function runs for the first
    time. Another thread counts where `elsewhere` says so, from Python 3.12 on.
    """

    def __init__(
        self,
        path: Callable[[], str],
        first: Callable[[Seen, FrameType], None] = lambda _seen, _frame: None,
        elsewhere: Callable[[], bool] = lambda: False,
    ) -> None:
        self._path, self._first, self._elsewhere = path, first, elsewhere
        self.seen: dict[tuple[int, int], Seen] = {}  # by code and module, by identity
        self._skipped: dict[int, CodeType] = {}  # kept alive: ids are used again
        self._thread = 0
        self.trace: Any = None  # what may rest while nothing of the user's runs
        self._leave: Callable[[], None] = lambda: None

    def __enter__(self) -> CodeWatch:
        self._thread = threading.get_ident()
        for callback in gc.callbacks:  # Python's collector calls them at any time
            code = getattr(callback, "__code__", None)
            if code is not None:
                self._skipped[id(code)] = code
        if sys.version_info < (3, 12) or not self._monitor():
            self._trace()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """While active, note nothing: frames that are traced hold their arguments to the end."""
        self._leave()
        try:
            yield
        finally:
            self.__enter__()

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

    def add(self, others: Iterable[Seen]) -> None:
        """Note what was noted apart."""
        for other in others:
            known = self.seen.setdefault((id(other.code), id(other.globals)), other)
            known.paths |= other.paths
            known.free |= other.free
            known.owners |= other.owners

    def _note(self, code: CodeType, frame: FrameType) -> None:
        key = id(code), id(frame.f_globals)
        seen = self.seen.get(key)
        if seen is None:
            seen = self.seen[key] = Seen(code, frame.f_globals)
            self._first(seen, frame)
        seen.paths.add(self._path())
        if code.co_freevars or code.co_argcount:
            values = frame.f_locals
            if code.co_freevars:
                seen.free.add(tuple(id(values.get(name)) for name in code.co_freevars))
            if code.co_argcount:
                seen.owners.add(type(values.get(code.co_varnames[0])))

    def _is_users(self, code: CodeType, frame: FrameType) -> bool:
        return is_users(frame.f_globals.get("__name__")) and not code.co_filename.startswith(
            "<frozen"
        )

    # ------------------------------------------------------------------ before Python 3.12

    def _trace(self) -> None:
        before, skipped = sys.gettrace(), self._skipped

        def trace(frame: FrameType, event: Any, arg: Any) -> Any:
            code = frame.f_code
            if id(code) not in skipped:
                if self._is_users(code, frame):
                    self._note(code, frame)
                else:
                    skipped[id(code)] = code
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
            if threading.get_ident() != self._thread and not self._elsewhere():
                return None
            frame = sys._getframe(1)
            if id(code) in self._skipped or not self._is_users(code, frame):
                return monitoring.DISABLE
            self._note(code, frame)
            return None

        def leave() -> None:
            monitoring.set_events(tool, 0)
            monitoring.register_callback(tool, starts, None)
            monitoring.free_tool_id(tool)

        monitoring.use_tool_id(tool, "rockmate")
        self._leave = leave
        monitoring.register_callback(tool, starts, start)
        monitoring.set_events(tool, starts)
        return True
