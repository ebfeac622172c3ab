"""Refuse modules of which a capture would lose something silently, and say where in the code.

Errors that stop a recording are told with the place in the user's code and advice.
"""

from __future__ import annotations

import contextlib
import linecache
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rkgb.elements.sample import Sample
from rkgb.errors import (
    DataDependentError,
    NotRecordedError,
    ReadsDataError,
    SideEffectError,
    TraceError,
    UnsupportedOpError,
    in_module,
)
from rkgb.outside.used_up import is_used_up

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


def refuse_backward_hooks(model: nn.Module, path: str) -> None:
    """Refuse a call of a submodule with backward hooks, which a recording would not call.

    Those of a submodule that is never called run never.

    Raises:
        UnsupportedOpError: it has one.
    """
    for kind in _HOOKS:
        hooks = getattr(model.get_submodule(path), kind, None)
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


def refuse_used_up(model: nn.Module, sample: Sample) -> None:
    """Refuse an argument that changes by being used: planning would use it before the step does.

    Raises:
        TraceError: one is an iterator, a generator, an open file or a queue.
    """
    for leaf in sample.leaves:
        if is_used_up(leaf):
            raise TraceError(
                f"cannot record {type(model).__name__} on an argument that changes by being used, "
                f"a {type(leaf).__name__}: planning would use it up. Pass what it gives, as the "
                "numbers that it draws."
            )


# Known data dependence in libraries, with advice.
_HINTS = {
    "torch/nn/modules/transformer.py": "say whether the mask is causal: pass is_causal "
    "(tgt_is_causal, src_is_causal, memory_is_causal), so that the mask is not looked at",
    "torch/nn/modules/batchnorm.py": "give momentum a number",
    "masking_utils.py": "pass the mask with 4 dimensions (batch, 1, length, length), which is not "
    "looked at; decoders also do without looking with attn_implementation='eager'",
}
_USUAL_HINT = (
    "use torch.where or torch.cond, pass numbers as arguments, or keep that part outside the "
    "wrapped module"
)


def explained(
    model: nn.Module,
    name: str,
    error: BaseException,
    leaves: Sequence[Any] = (),
    *,
    module_path: str | None,
) -> TraceError:
    """Return the error to raise for a step that raised `error`, called with these `leaves`."""
    where = where_raised(model, error)
    if isinstance(error, NotRecordedError):
        found = f"its forward {error.found}"
        return SideEffectError.to_capture(name, error.do, found, where, module_path=module_path)
    if isinstance(error, ReadsDataError):
        place = f"in the backward {error.backward}" if error.backward else where
        hint = next((hint for file, hint in _HINTS.items() if file in where), _USUAL_HINT)
        return DataDependentError.to_capture(
            name,
            hint,
            f"{error.what} depends on the data, the values of tensors, which a recording would "
            "freeze",
            place,
            module_path=module_path,
        )
    text = str(error).strip()
    first = text.splitlines()[0].rstrip(".") if text else "(no message)"
    do, sample = _about(leaves)
    raised = f"{sample}its forward or backward raised {type(error).__name__}: {first}"
    return TraceError.to_capture(name, do, raised, where, module_path=module_path)


def _about(leaves: Sequence[Any]) -> tuple[str, str]:
    """Return what to do for a step with these `leaves` not to fail, and what is odd about them."""
    if not leaves or any(isinstance(leaf, Tensor) for leaf in leaves):
        return (
            "give the sample as your training loop calls it: a tensor, a tuple of arguments, or a "
            "dict of keyword arguments; if it fails when called so without Rockmate, mend that "
            "first",
            "",
        )
    odd = leaves[0]
    if type(odd).__module__.partition(".")[0] == "numpy":
        return "give torch.from_numpy(sample) as the sample", "the sample is a numpy array, and "
    if isinstance(odd, (str, bytes)):
        return (
            "give as the sample what the tokenizer makes of the text",
            "the sample is text, and ",
        )
    return (
        "give as the sample what it is called with, such as a tensor",
        f"the sample holds no tensor but {type(odd).__name__}, and ",
    )
