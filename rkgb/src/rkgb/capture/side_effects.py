"""What a forward does besides returning results: found, said where, refused, and undone.

A recorded step repeats operations on tensors. It does not set attributes, print, or draw from
Python's random numbers.
"""

from __future__ import annotations

import io
import random
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.errors import SideEffectError
from rkgb.refusals import place_of

_TORCH_DIR = str(Path(torch.__file__).parent)
_CONTAINERS = (list, dict, set, deque)
# Kept by nn.Module itself; buffers have a message of their own.
_OWN = frozenset(("_parameters", "_buffers", "_modules"))


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the module's own attributes that a capture freezes: numbers, flags and strings."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str)) and not name.startswith("_")
    }


class KeptState:
    """The attributes of every module of a model as they were, shallow copies of containers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = [
            (path, module, dict(vars(module))) for path, module in model.named_modules()
        ]
        self.contents = [
            (value, _content(value))
            for _, _, attributes in self.modules
            for value in attributes.values()
            if isinstance(value, _CONTAINERS)
        ]
        self.random = random.getstate()
        self.numpy = _numpy_state()

    def restore(self) -> None:
        """Put every attribute, and what is in the containers among them, back."""
        random.setstate(self.random)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        for _, module, before in self.modules:
            now = vars(module)
            for name in [name for name in now if name not in before]:
                del now[name]
            for name, value in before.items():
                if now.get(name) is not value:
                    now[name] = value
        for container, content in self.contents:
            if not _same(_content(container), content):
                container.clear()
                if isinstance(container, (dict, set)):
                    container.update(content)
                else:
                    container.extend(content)

    def refuse_changes(self, run_again: Callable[[], object]) -> None:
        """Refuse a forward that has changed an attribute or drawn from Python's `random`.

        Raises:
            SideEffectError: with the module and the line, which `run_again` is run to find.
        """
        sources: list[tuple[str, Any, Callable[[], Any]]] = [
            ("Python's `random`", self.random, random.getstate),
            ("numpy's random numbers", self.numpy, _numpy_state),
        ]
        for drawn, before, state in sources:
            if _same_state(before, state()):
                continue
            path, source = _where_drawn(self.model, run_again, state)
            raise SideEffectError(
                f"cannot capture {type(self.model).__name__}: its forward draws from {drawn} at "
                f"{source} in module '{path or '(root)'}', which a captured graph would freeze. "
                "Draw with torch instead."
            )
        for path, module, attributes in self.modules:
            for name, value in vars(module).items():
                what = self._change(name, value, attributes)
                if what is not None:
                    self._refuse(path, module, name, what, run_again)

    def _change(self, name: str, value: Any, before: Mapping[str, Any]) -> str | None:
        """Return in words how an attribute has changed in a way that matters, or None."""
        if name in _OWN:
            return None
        if isinstance(value, Tensor):
            return "keeps a tensor in" if before.get(name) is not value else None
        if name.startswith("_"):
            return None
        if isinstance(value, (bool, int, float, str, *_CONTAINERS)) and name not in before:
            return "sets"
        if isinstance(value, (bool, int, float, str)):
            old = before[name]
            return f"changes ({old!r} -> {value!r})" if old != value else None
        if isinstance(value, _CONTAINERS):
            content = next((c for held, c in self.contents if held is value), None)
            if content is not None and len(content) != len(value):
                kind = type(value).__name__
                return f"changes ({kind} of {len(content)} -> {kind} of {len(value)})"
        return None

    def _refuse(
        self, path: str, module: nn.Module, name: str, what: str, run_again: Callable[[], object]
    ) -> None:
        source = _where_set(self.model, module, name, run_again)
        at = f" at {source}" if source else ""
        verb, _, values = what.partition(" (")
        if verb == "changes":
            advice = "freeze. Keep it in a buffer, or change it outside."
        elif verb == "sets":
            advice = "not do. Set it in __init__, or keep it in a buffer if it changes."
        else:
            advice = f"not do. Return it, or write it into a buffer: self.{name}.copy_(…)."
        raise SideEffectError(
            f"cannot capture {type(self.model).__name__}: its forward {verb} the attribute "
            f"'{name}'{f' ({values}' if values else ''} of module '{path or '(root)'}'{at}, which "
            f"a captured graph would {advice}"
        )


class Printed(io.StringIO):
    """Takes what is printed, and remembers where the first of it came from."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.place = ("", "")

    def write(self, text: str) -> int:
        if not self.place[1]:
            self.place = _here(self.model)
        return super().write(text)

    def refuse(self) -> None:
        """Refuse the forward if it has printed.

        Raises:
            SideEffectError: it has.
        """
        if not self.getvalue():
            return
        text = self.getvalue().strip()[:80].splitlines() or [""]
        path, source = self.place
        raise SideEffectError(
            f"cannot capture {type(self.model).__name__}: its forward prints ({text[0]!r}) at "
            f"{source} in module '{path or '(root)'}', and a captured graph would print nothing. "
            "Remove the print, or move it out of forward."
        )


def refuse_new_buffers(
    model: nn.Module, before: Mapping[str, Tensor], run_again: Callable[[], object]
) -> None:
    """Refuse a forward that put another tensor in the place of a buffer.

    Raises:
        SideEffectError: a buffer is another object than `before`.
    """
    after = dict(model.named_buffers(remove_duplicate=False))
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) is not after.get(name):
            path, _, buffer = name.rpartition(".")
            source = _where_set(model, model.get_submodule(path), buffer, run_again)
            at = f" at {source}" if source else ""
            raise SideEffectError(
                f"cannot capture {type(model).__name__}: its forward assigns a new tensor to the "
                f"buffer '{buffer}' of module '{path or '(root)'}'{at}, which a captured graph "
                f"would not do. Write into it instead: self.{buffer}.copy_(…)."
            )


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")  # where it is not loaded, nothing draws from it
    return numpy.random.get_state() if numpy is not None else None


def _same_state(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    pairs = zip(a, b, strict=True)
    return all(bool((x == y).all()) if hasattr(x, "all") else x == y for x, y in pairs)


def _content(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(value is b[key] for key, value in a.items())
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _here(model: nn.Module) -> tuple[str, str]:
    return place_of(model, reversed(list(traceback.walk_stack(sys._getframe(2)))))


def _where_set(
    model: nn.Module, module: nn.Module, name: str, run_again: Callable[[], object]
) -> str:
    """Return 'file.py:12 (code)' of the first line that sets an attribute of `module`."""
    found: list[str] = []
    original = nn.Module.__setattr__

    def watching(self: nn.Module, key: str, value: Any) -> None:
        if self is module and key == name and not found:
            found.append(_here(model)[1])
        original(self, key, value)

    nn.Module.__setattr__ = watching  # type: ignore[method-assign,assignment]
    try:
        run_again()
    finally:
        nn.Module.__setattr__ = original  # type: ignore[method-assign]
    return found[0] if found else ""


def _where_drawn(
    model: nn.Module, run_again: Callable[[], object], state: Callable[[], Any]
) -> tuple[str, str]:
    """Return (module path, 'file.py:12 (code)') of the first line that changes `state()`.

    Draws are made by compiled code that tells nobody, so the state is looked at after every line.
    """
    found: list[tuple[str, str]] = []
    start = state()
    last: dict[FrameType, int] = {}

    def watching(frame: FrameType, event: str, _value: Any) -> Any:
        if found or frame.f_code.co_filename.startswith(_TORCH_DIR):
            return None
        if event == "call":
            return watching
        if not _same_state(state(), start):
            above = [] if frame.f_back is None else list(traceback.walk_stack(frame.f_back))
            here = (frame, last.get(frame, frame.f_lineno))
            found.append(place_of(model, reversed([here, *above])))
            return None
        last[frame] = frame.f_lineno
        return watching

    before = sys.gettrace()
    sys.settrace(watching)
    try:
        run_again()
    finally:
        sys.settrace(before)
    return found[0] if found else ("", "unknown source")
