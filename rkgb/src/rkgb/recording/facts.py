"""What the user's code asks tensors for beside their kind (`torch_api/tensor_facts.py`)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FrameType, FunctionType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function

from rkgb.errors import NotRecordedError
from rkgb.guards.owners import is_users
from rkgb.torch_api.tensor_facts import NAMES, PLAIN, fact, original_fact, written_on

_BETWEEN = ("rkgb.recording", "torch.overrides", "torch._tensor")  # a question and its answer


class TensorFacts:
    """Questions to which the tensors of a step answer otherwise than a user's.

    `originals` are the user's tensors in a module, by the identity of those in its copy. What these
    are asked for is noted: it may be otherwise at a later call.
    """

    def __init__(self, originals: Mapping[int, Any]) -> None:
        self._originals = originals
        # By tensor and name: the user's tensor, and where it was asked.
        self.asked: dict[tuple[int, str], tuple[Tensor, str]] = {}

    def answer(self, func: Callable[..., Any], args: Sequence[Any], *, known: bool = True) -> Any:
        """Return the user's answer in a list, if a call of torch's asks for one that is otherwise.

        Raises:
            NotRecordedError: the answer is an object, or is not `known` in later steps.
        """
        name = name_of_function(func)
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name not in NAMES or not args or not isinstance(args[0], Tensor):
            return None
        frame = _asking()
        if frame is None:
            return None
        tensor = args[0]
        own = self._originals.get(id(tensor))
        if isinstance(own, Tensor):
            where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
            self.asked[id(own), name] = own, where
            right, known = fact(own, name), False  # a copy in a test would answer for itself
        else:
            right = original_fact(tensor, name)
        if right == fact(tensor, name):
            return None
        if known and name in PLAIN:
            return [right]
        raise NotRecordedError(
            f"asks a tensor for its '{name}', which is otherwise for the one that was given than "
            "for one that stands for it in a planned step",
            "ask for it outside of forward, and pass the answer as an argument",
        )


def name_of_function(func: Any) -> str:
    """Return the name of a function, without `getattr`, which is watched as the user's."""
    try:
        return str(func.__name__)
    except AttributeError:
        return ""


def running(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of torch that runs, asked by the `__torch_function__` of a mode.

    Torch looks it up by its name. Where a user has replaced it there, theirs has called torch's,
    and must not run once more.
    """
    if isinstance(func, FunctionType):
        is_torchs = str(func.__globals__.get("__name__")).startswith("torch")
    else:
        is_torchs = not isinstance(func, partial) and not is_users(type(func).__module__)
    if is_torchs:
        return func
    frame = sys._getframe(2)
    if frame.f_code is handle_torch_function.__code__ and frame.f_back is not None:
        code = frame.f_back.f_code
        return func if code.co_freevars else FunctionType(code, frame.f_back.f_globals)
    name = next((name for name, value in vars(Tensor).items() if value is func), "")
    method: Callable[..., Any] = getattr(Tensor.__base__, name, func)
    return method


class FactWatch(TorchFunctionMode):
    """While active, tensors answer as the user's, or refuse to where that is not `known` later."""

    def __init__(self, facts: TensorFacts, *, known: bool) -> None:
        super().__init__()
        self._facts, self._known = facts, known

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        func = running(func)
        answer = self._facts.answer(func, args, known=self._known)
        return func(*args, **(kwargs or {})) if answer is None else answer[0]


def refuse_result(made: Tensor) -> None:
    """Refuse a result that a step would return otherwise.

    Raises:
        NotRecordedError: an attribute is written on it, it is a leaf with a gradient of its own, or
            of a class of the user's.
    """
    kind = type(made)
    if is_users(kind.__module__):
        raise NotRecordedError(
            f"returns a tensor of the class {kind.__qualname__}, where a planned step would return "
            "a plain one",
            "let it return a plain tensor (as_subclass(torch.Tensor)), and make the other outside",
        )
    if written := written_on(made):
        raise NotRecordedError(
            f"sets the attribute '{next(iter(written))}' of a tensor that it returns, which a "
            "planned step would not do",
            "return what is to be kept beside the tensor",
        )
    if made.requires_grad and made.is_leaf:
        raise NotRecordedError(
            "returns a leaf that it has made, whose gradient would not come to it",
            "make it outside of forward, and pass it as an argument",
        )


def answering(tensors: Iterable[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """While active, these answer as those that they stand for."""
    if any(original_fact(t, name) != fact(t, name) for t in tensors for name in PLAIN):
        return FactWatch(TensorFacts({}), known=True)
    return contextlib.nullcontext()


def _asking() -> FrameType | None:
    """Return the frame that asks, if it is the user's: libraries ask for what they know."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return frame if frame is not None and is_users(frame.f_globals.get("__name__")) else None
