"""Side effects of a forward: they are found, located, refused, and undone.

A recorded step repeats operations on tensors. It does not set attributes, print, or draw Python's
random numbers.
"""

from __future__ import annotations

import collections
import io
import random
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from rkgb.elements.module_paths import is_inside_any
from rkgb.errors import SideEffectError, in_module
from rkgb.guards.code_watch import Seen
from rkgb.module_state.start_of_call import ModuleState, draw_from_numpy, numpy_state
from rkgb.safeguards.assignments import all_inside
from rkgb.safeguards.other_threads import changes_meanwhile, may_draw, same_state
from rkgb.safeguards.refusals import place_of
from rkgb.torch_api.tensor_facts import placed_parameters

_TORCH_DIR = str(Path(torch.__file__).parent)


class KeptState(ModuleState):
    """The attributes of every module of a model and of its parameters as they were.

    Parts that run `whole` may set those of parameters.
    """

    def __init__(self, model: nn.Module, whole: Sequence[str] = ()) -> None:
        super().__init__(model)
        self.of_parameters = [
            (path, parameter, dict(vars(parameter)), parameter.requires_grad)
            for path, parameter in placed_parameters(model)
            if not is_inside_any(path, whole)
        ]

    def refuse_changes(
        self,
        run_again: Callable[[], object],
        ignored: Callable[[], bool] = lambda: False,
        ran: Collection[Seen] = (),
    ) -> None:
        """Refuse a forward that has set an attribute of a parameter, or drawn by Python.

        Changes inside `ignored()` do not count. Draws of another thread do not count either, if
        none of the user's functions that `ran` may draw.

        Raises:
            SideEffectError: with the module and the line, which a call of `run_again` finds.
        """
        sources: list[tuple[str, Any, Callable[[], Any], Callable[[], object]]] = [
            ("Python's `random`", self.random.python, random.getstate, random.random),
            ("numpy's random numbers", self.random.numpy, numpy_state, draw_from_numpy),
        ]
        for drawn, before, state, draw in sources:
            if same_state(before, state()):
                continue
            if not may_draw(ran) and changes_meanwhile(draw, state, same_state):
                self.random.leave()
                continue
            path, source = _where_drawn(self.model, run_again, state, ignored)
            raise SideEffectError.to_capture(
                type(self.model).__name__,
                "draw with torch instead",
                f"its forward draws from {drawn}, which a recording would freeze",
                f"{source} in {in_module(path)}",
                module_path=path,
            )
        for path, parameter, attributes, wants in self.of_parameters:
            now = vars(parameter)
            holder = path.rpartition(".")[0]
            for name in {**attributes, **now}:
                if now.get(name) is not attributes.get(name):
                    raise SideEffectError.to_capture(
                        type(self.model).__name__,
                        f"keep the attribute '{name}' in the module, or change it outside",
                        "its forward changes this attribute of a parameter, which a recording "
                        "would freeze",
                        f"parameter '{path}'",
                        module_path=holder if all_inside(holder, ran, name) else "",
                    )
            if parameter.requires_grad != wants:
                raise SideEffectError.to_capture(
                    type(self.model).__name__,
                    "freeze and unfreeze parameters outside of forward",
                    f"its forward {'freezes' if wants else 'unfreezes'} this parameter",
                    f"parameter '{path}'",
                    module_path="",
                )


class RemembersError(Exception):
    """Functions remember results that they have computed; what they said then, they say no more."""


class Said:
    """What a forward prints and logs, and the first place; what is `ignored()` is dropped."""

    def __init__(self, model: nn.Module, ignored: Callable[[], bool]) -> None:
        self.model, self.ignored = model, ignored
        self.place = ("", "")
        self._messages: list[tuple[str, Callable[[], object]]] = []

    def add(self, text: str, put_out: Callable[[], object]) -> None:
        """Note a message, and how it would have been put out."""
        if self.ignored():  # what runs whole prints at each step
            return
        if not self._messages:
            self.place = _here(self.model)
        self._messages.append((text, put_out))

    def put_out_but(self, again: Said) -> None:
        """Put out what has not been said again: functions that remember say it once."""
        known = collections.Counter(text for text, _ in again._messages)
        for text, put_out in self._messages:
            known[text] -= 1
            if known[text] < 0:
                put_out()

    def refuse(self) -> None:
        """Refuse a forward that has said something.

        Raises:
            SideEffectError: it has printed or logged.
        """
        if not self._messages:
            return
        text = "".join(text for text, _ in self._messages).strip()[:80].splitlines() or [""]
        path, source = self.place
        raise SideEffectError.to_capture(
            type(self.model).__name__,
            "leave the message out, or move it out of forward",
            f"its forward prints or logs {text[0]!r}, and a recording would do neither",
            f"{source} in {in_module(path)}",
            module_path=path,
        )


class Printed(io.StringIO):
    """Stands for a stream of Python's, whose text is not put out."""

    def __init__(self, said: Said, name: str) -> None:
        super().__init__()
        self._said, self._put_out = said, getattr(sys, name).write

    def write(self, text: str) -> int:
        self._said.add(text, partial(self._put_out, text))
        return len(text)


def _here(model: nn.Module) -> tuple[str, str]:
    return place_of(model, reversed(list(traceback.walk_stack(sys._getframe(2)))))


def _where_drawn(
    model: nn.Module,
    run_again: Callable[[], object],
    state: Callable[[], Any],
    ignored: Callable[[], bool],
) -> tuple[str, str]:
    """Return (module path, 'file.py:12 (code)') of the first line that changes `state()`.

    Compiled code draws unseen, so the state is compared after every line.
    """
    found: list[tuple[str, str]] = []
    start = state()
    last: dict[FrameType, int] = {}

    def watching(frame: FrameType, event: str, _value: Any) -> Any:
        if found or frame.f_code.co_filename.startswith(_TORCH_DIR):
            return None
        if event == "call":
            return watching
        if not ignored() and not same_state(state(), start):
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
