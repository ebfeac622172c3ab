"""Functions and modules compiled by `torch.compile`, and their original code."""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from rkgb.torch_api.patches import Patches, as_before

BRANCHES = ("cond", "while_loop")  # functions of torch that compile their arguments


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """While active, functions that `torch.compile` has compiled run their original code."""
    names = [name for name in BRANCHES if hasattr(torch, name)]
    with contextlib.ExitStack() as stack:
        # If nothing loaded the compiler, nothing was compiled. Loading it takes a second.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(
            Patches([(torch, name, _compiling(getattr(torch, name))) for name in names])
        )
        yield


def _compiling(branch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that undoes `uncompiled` inside, because it needs the compiler."""

    def compiling(*args: Any, **kwargs: Any) -> Any:
        # A compiler captures the methods and builtins that it finds, and refuses code that asks for
        # the thread. While it is loaded, it notes what the builtins are.
        with as_before(builtins), as_before(nn.Module), torch.compiler.set_stance("default"):
            return branch(*args, **kwargs)

    return compiling


def written_function(value: Any) -> Any:
    """Return the original function or bound method of a compiled one; None for others."""
    if not isinstance(value, FunctionType):  # other objects may refuse any attribute
        return None
    written: Any = getattr(value, "_torchdynamo_orig_callable", None)
    code = getattr(written, "__code__", None)
    if code is not None and "_dynamo" in Path(code.co_filename).parts:  # a wrapper of torch's own
        return written.__wrapped__
    return written


def is_in_compiled_code() -> bool:
    """Return whether code that `torch.compile` has compiled is among the callers."""
    frame = sys._getframe(1) if "torch._dynamo" in sys.modules else None
    while frame is not None:
        code, frame = frame.f_code, frame.f_back
        if code.co_qualname.startswith("_TorchDynamoContext"):
            return True
    return False


def is_optimized(module: Any) -> bool:
    """Return whether this is the module that `torch.compile` returns for another one."""
    return type(module).__name__ == "OptimizedModule"


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the paths of submodules that are compiled or have compiled forwards."""
    return [
        path
        for path, module in model.named_modules()
        if is_optimized(module)
        or module._compiled_call_impl is not None
        or written_function(vars(module).get("forward")) is not None
    ]
