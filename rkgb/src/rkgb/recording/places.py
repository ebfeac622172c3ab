"""The module and the source line of a recorded operation."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import torch
from torch import nn

from rkgb.elements.module_paths import is_inside
from rkgb.guards.loads import loads_of
from rkgb.torch_api.patches import Patches

_TORCH_DIR = str(Path(torch.__file__).parent)
_RKGB_DIR = str(Path(__file__).parents[1])
_TORCH_MODULES = f"{_TORCH_DIR}/nn/modules"


RunWhole = Callable[[str, nn.Module, tuple[Any, ...], Mapping[str, Any]], Any]


class Places:
    """Tracks the running module of a model; `here()` adds the line of the user's code."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._stack = [""]
        self._run_whole: Mapping[str, RunWhole] = {}
        self._raised: BaseException | None = None
        # Paths of the calls through which the last exception passed, the outermost first.
        self.raised_in: tuple[str, ...] = ("",)
        self.called: set[str] = set()
        self.called_again: set[str] = set()  # by checkpoints, and those that call checkpoints
        self._checkpoints = 0  # that run
        self.draws_again = False  # whether one of them runs again on other random numbers
        self.outside: dict[int, nn.Module] = {}  # modules outside the model that ran
        self.catches = False  # whether the user's Python may catch the error of an operation
        self._kinds: dict[CodeType, tuple[int, str]] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While active, calls of the model's modules are tracked."""
        original = nn.Module.__call__
        paths, stack = self._paths, self._stack

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(module))
            if path is None:
                self.outside.setdefault(id(module), module)
                return original(module, *args, **kwargs)
            stack.append(path)
            self.called.add(path)
            if self._checkpoints:
                self.called_again.add(path)
            try:
                whole = self._run_whole.get(path)
                if whole is None:
                    return original(module, *args, **kwargs)
                # `run` calls the module itself, and compilers inspect its attributes.
                with patches.undone():
                    return whole(path, module, args, kwargs)
            except BaseException as error:
                if self._raised is not error:
                    self._raised, self.raised_in = error, tuple(stack[1:])
                raise
            finally:
                stack.pop()

        with Patches([(nn.Module, "__call__", call)]) as patches:
            yield

    @contextlib.contextmanager
    def in_checkpoint(self, keeps_random_state: bool) -> Iterator[None]:
        """While active, what runs is noted: plain PyTorch runs it again in the backward."""
        self.called_again.add(self.path)
        self._checkpoints += 1
        before, self.draws_again = self.draws_again, self.draws_again or not keeps_random_state
        try:
            yield
        finally:
            self._checkpoints -= 1
            self.draws_again = before

    def note_again(self, path: str) -> None:
        """Note that plain PyTorch runs parts of a module again in the backward."""
        self.called_again.update(p for p in self._paths.values() if is_inside(p, path))

    def run_whole(self, paths: Iterable[str], run: RunWhole) -> None:
        """Let `run` make the calls of these modules, except for calls inside `run`."""
        self._run_whole = dict.fromkeys(paths, run)

    @property
    def path(self) -> str:
        """Path of the running module."""
        return self._stack[-1]

    def here(self) -> tuple[str, str]:
        """Return (module path, 'file.py:12') of the running code.

        The line is the innermost one outside torch and rkgb, or else in torch's own modules.
        """
        self.catches = self.catches or self.may_catch()
        return self._stack[-1], self._source()

    def may_catch(self) -> bool:
        """Return whether a running function of the user's may catch the error of an operation."""
        return any(
            kind == _USERS and loads_of(frame.f_code).catches for frame, kind, _ in self._running()
        )

    def _source(self) -> str:
        torchs = ""
        for frame, kind, name in self._running():
            if kind == _USERS:
                return f"{name}:{frame.f_lineno}"
            if kind == _TORCHS and not torchs:
                torchs = f"{name}:{frame.f_lineno}"
        return torchs or "unknown source"

    def _running(self) -> Iterator[tuple[FrameType, int, str]]:
        """Yield the frames of the forward, the innermost first, with their kinds and files."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            found = self._kinds.get(code)
            if found is None:
                found = self._kinds[code] = _kind(code.co_filename)
            if found[0] == _OUTERMOST:
                return
            yield frame, *found
            frame = frame.f_back


# Kinds of frames: irrelevant ones, torch's own modules, the user's code, and the call of the model,
# outside of which nothing belongs to the forward.
_PASSED_OVER, _TORCHS, _USERS, _OUTERMOST = range(4)
_CAPTURE = str(Path(__file__).parents[1] / "capture" / "step.py")


def _kind(filename: str) -> tuple[int, str]:
    if filename == _CAPTURE:
        return _OUTERMOST, ""
    path = Path(filename)
    if filename.startswith((_RKGB_DIR, "<")) or filename == contextlib.__file__:
        return _PASSED_OVER, ""
    if not filename.startswith(_TORCH_DIR):
        return _USERS, path.name
    if filename.startswith(_TORCH_MODULES):
        return _TORCHS, f"torch/{path.relative_to(_TORCH_DIR).as_posix()}"
    return _PASSED_OVER, ""


# Between a line and the operation that it runs.
_WRAPPERS = tuple(f"{Path(torch.__file__).parent}/{name}" for name in ("_tensor.py", "_ops.py"))


def only_raises() -> bool:
    """Return whether the running line reads a value only to raise an error.

    What it returns as a bool is read by the line that has called it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_RKGB_DIR, *_WRAPPERS)):
        frame = frame.f_back
    while frame is not None and _runs(frame, 1):
        frame = frame.f_back
    return frame is not None and _runs(frame, 0)


def _runs(frame: FrameType, which: Literal[0, 1]) -> bool:
    lines = _reads_of(frame.f_code.co_filename)[which]
    return any(first <= frame.f_lineno <= last for first, last in lines)


_Lines = list[tuple[int, int]]  # first and last ones


@functools.lru_cache(maxsize=256)
def _reads_of(filename: str) -> tuple[_Lines, _Lines]:
    """Return where a value may be read in a file.

    That is in conditions that lead only to an error, and in `return bool(...)` or
    `return not bool(...)`.
    """
    checked, returned = _Lines(), _Lines()
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:  # no source, or a template's
        return checked, returned
    for node in ast.walk(tree):
        raises = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)
        if isinstance(node, (ast.If, ast.Assert)) and (raises or isinstance(node, ast.Assert)):
            checked.append(_lines(node.test))
        elif isinstance(node, ast.Return) and node.value is not None and _is_bool(node.value):
            returned.append(_lines(node))
    return checked, returned


def _is_bool(value: ast.expr) -> bool:
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not):
        value = value.operand
    called = value.func if isinstance(value, ast.Call) else None
    return isinstance(called, ast.Name) and called.id == "bool"


def _lines(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno
