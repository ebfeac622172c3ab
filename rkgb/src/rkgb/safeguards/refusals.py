"""Refuse modules of which a capture would lose something silently, and find places in the code."""

from __future__ import annotations

import contextlib
import linecache
import traceback
from collections.abc import Collection, Iterable
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rkgb.elements.module_paths import is_inside
from rkgb.errors import TraceError, UnsupportedOpError, in_module

_TORCH_DIR = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parents[1])
_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def where_raised(model: nn.Module, error: BaseException) -> str:
    """Return 'file.py:12 (code) in module 'path'' of the innermost line in the user's code.

    The line is outside torch and rkgb, or else in torch's own modules.
    """
    path, source = place_of(model, traceback.walk_tb(error.__traceback__))
    return f"{source} in {in_module(path)}"


def place_of(model: nn.Module, frames: Iterable[tuple[FrameType, int]]) -> tuple[str, str]:
    """Return (module path, 'file.py:12 (code)') of the most informative of `frames`."""
    names = {id(module): name for name, module in model.named_modules()}
    path, own, torchs = "", "", ""
    for frame, line in frames:
        filename = frame.f_code.co_filename
        module = frame.f_locals.get("self")
        if issubclass(type(module), nn.Module) and names.get(id(module)):
            path = names[id(module)]
        if filename.startswith((_HERE, "<")) or filename == contextlib.__file__:
            continue
        if not filename.startswith(_TORCH_DIR):
            code = linecache.getline(filename, line).strip()
            own = f"{Path(filename).name}:{line} ({code})"
        elif filename.startswith(f"{_TORCH_DIR}/nn/"):
            torchs = f"torch/{Path(filename).relative_to(_TORCH_DIR).as_posix()}:{line}"
    return path, own or torchs or "unknown source"


def refuse_lazy_modules(model: nn.Module) -> None:
    """Refuse modules whose parameters get their shapes from the first input.

    Raises:
        TraceError: a module has had no input yet.
    """
    for path, module in model.named_modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(is_lazy(tensor) for tensor in own):
            raise TraceError.to_capture(
                type(model).__name__,
                "run it once on the sample before",
                f"{type(module).__name__} has parameters without a shape until its first input",
                in_module(path),
            )


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether a backward of a module, not of its submodules, calls hooks."""
    return any(getattr(module, kind, None) for kind in _HOOKS)


def refuse_backward_hooks(model: nn.Module, but: Collection[str] = ()) -> None:
    """Refuse modules with backward hooks, which a recording would not call.

    Hooks in the submodules `but` are allowed.

    Raises:
        UnsupportedOpError: a module, the model included, has one.
    """
    for path, module in model.named_modules():
        if any(is_inside(path, p) for p in but):
            continue
        for kind in _HOOKS:
            hooks = getattr(module, kind, None)
            if hooks:
                hook = next(iter(hooks.values()))
                code = getattr(hook, "__code__", None)
                source = f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""
                raise UnsupportedOpError.to_capture(
                    type(model).__name__,
                    "remove the module's backward hook, or put it on the gradient of a parameter",
                    "the hook would not be called",
                    f"{source or 'unknown source'} in {in_module(path)}",
                    op=kind.strip("_"),
                    module_path=path,
                    source=source,
                )


def refuse_hidden_leaves(model: nn.Module) -> None:
    """Refuse a tensor attribute that requires a gradient but is no parameter: it would get none.

    Raises:
        UnsupportedOpError: a module has one.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf:
                raise UnsupportedOpError.to_capture(
                    type(model).__name__,
                    f"make '{name}' an nn.Parameter, or a buffer without gradient",
                    "it is a tensor that requires a gradient, and no parameter",
                    in_module(path),
                    op=name,
                    module_path=path,
                    source="",
                )
