"""Make Python code that is being captured take the branches that it takes in eager mode.

Libraries ask "am I being traced?" and then choose other kernels, so that the captured graph is not
the one that eager runs, and bits differ. Inside `as_eager()` the answer is no. Code that then looks
at the value of a tensor, to choose a branch, gets it where the value cannot depend on data: tensors
made from numbers alone (positions, causal masks) carry their real value along. A branch on any
other tensor still fails as data-dependent.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.traceback import annotate
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from rkgb.op_kinds import CONSTRUCTORS

_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__)), "<")
_CAPTURE = str(Path(__file__).with_name("trace.py"))  # calls the user's model
_VALUE = "_rkgb_value"
MODE = "rkgb_mode"  # key in a node's metadata: the Mode in which its call was made
_MAX_ELEMENTS = 1 << 22
# How Python asks for the value of a tensor.
_READS = frozenset(("__bool__", "item", "__int__", "__float__", "__index__", "tolist"))


# What a captured graph would not do again, and what to do instead.
_NOT_CAPTURED = {
    "register_hook": "registers a hook on a tensor, which would not be called. Put it on a "
    "parameter, outside of forward",
    "grad": "calls torch.autograd.grad. Keep that part outside the wrapped module",
    "backward": "calls backward. Keep that part outside the wrapped module",
}


class Mode(NamedTuple):
    """What a call was made in; export loses some of it where regions are nested."""

    grad_enabled: bool
    autocast_region: int  # counts how often the cache of casts has been emptied
    autocast_cached: bool
    source: str  # 'file.py:12' of the call, which export keeps only for functions named forward


class NotCapturedError(Exception):
    """The forward does something that is no operation; the text completes 'its forward …'."""


@contextlib.contextmanager
def as_eager() -> Iterator[None]:
    """While active, tracing looks like eager execution to the code that is traced."""
    compiler = torch.compiler
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    old = {flag: getattr(compiler, flag) for flag in flags if hasattr(compiler, flag)}
    # transformers asks besides whether a tensor is a fake one.
    hugging = sys.modules.get("transformers.utils.import_utils")
    old_check = getattr(hugging, "is_fake_tensor", None)
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    # It looks at the data, only to give a warning.
    old_warning = getattr(base, "warn_if_padding_and_no_attention_mask", None)
    old_cache, old_clear = torch.is_autocast_cache_enabled(), torch.clear_autocast_cache
    try:
        # Export switches the cache off, and a region would be recorded as if its user had.
        torch.set_autocast_cache_enabled(True)
        for flag in old:
            setattr(compiler, flag, False)
        if old_check is not None:
            hugging.is_fake_tensor = _no  # type: ignore[union-attr]
        if base is not None and old_warning is not None:
            base.warn_if_padding_and_no_attention_mask = _no_warning
        with _KnownValues() as watch:

            def clear_cache() -> None:
                watch.autocast_region += 1
                old_clear()

            torch.clear_autocast_cache = clear_cache
            yield
    finally:
        torch.clear_autocast_cache = old_clear
        torch.set_autocast_cache_enabled(old_cache)
        for flag, value in old.items():
            setattr(compiler, flag, value)
        if old_check is not None:
            hugging.is_fake_tensor = old_check  # type: ignore[union-attr]
        if base is not None and old_warning is not None:
            base.warn_if_padding_and_no_attention_mask = old_warning


def _source() -> str:
    """Return the line of the innermost caller that is not in torch, '' where there is none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != _CAPTURE:
        filename = frame.f_code.co_filename
        if not filename.startswith(_INSIDE):
            return f"{Path(filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _no(_tensor: Any) -> bool:
    return False


def _no_warning(*_args: Any, **_kwargs: Any) -> None:
    return None


_INPLACE_OPERATORS = frozenset(
    (
        *("__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__"),
        *("__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__"),
        *("__ilshift__", "__irshift__"),
    )
)


def _writes(name: str) -> bool:
    return name in _INPLACE_OPERATORS or (name.endswith("_") and not name.startswith("__"))


class _KnownValues(TorchFunctionMode):
    """Carries real values beside tensors that are made from numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.generation = 0
        self.autocast_region = 0
        self.ambient_grad = torch.is_grad_enabled()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _NOT_CAPTURED and getattr(func, "__module__", "").startswith("torch"):
            raise NotCapturedError(_NOT_CAPTURED[name])
        leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        known = all(self._value(t) is not None for t in leaves)
        if name in _READS and leaves and known:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                return func(*self._real(args), **self._real(kwargs))
        if not known and (_writes(name) or "out" in kwargs):
            self.generation += 1  # something known may have been overwritten: trust no value
        mode = Mode(
            torch.is_grad_enabled() or not self.ambient_grad,
            self.autocast_region,
            torch.is_autocast_cache_enabled(),
            _source(),
        )
        with annotate({MODE: mode}):
            result = func(*args, **kwargs)
        if known and (leaves or name in CONSTRUCTORS or name == "tensor"):
            self._follow(func, args, kwargs, result)
        return result

    def _value(self, tensor: Tensor) -> Tensor | None:
        found = getattr(tensor, _VALUE, None)
        return found[1] if found is not None and found[0] == self.generation else None

    def _real(self, tree: Any) -> Any:
        return pytree.tree_map_only(Tensor, self._value, tree)

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        outs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        if not outs or any(t.numel() > _MAX_ELEMENTS or t.requires_grad for t in outs):
            return
        try:
            with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
                real = func(*self._real(args), **self._real(kwargs))
        except Exception:  # no value to carry; a branch on it will be refused as data-dependent
            return
        reals = [t for t in pytree.tree_leaves(real) if isinstance(t, Tensor)]
        if len(reals) == len(outs):
            for out, value in zip(outs, reals, strict=True):
                setattr(out, _VALUE, (self.generation, value))
