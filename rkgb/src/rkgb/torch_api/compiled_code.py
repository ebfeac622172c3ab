"""What `torch.compile` has made of functions and modules, and the code that it was made from."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from rkgb.torch_api.patches import Patches, as_before

BRANCHES = ("cond", "while_loop")  # functions of torch that compile what they are given


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """While active, what `torch.compile` has made runs the code that it was made from."""
    # Whatever was compiled has loaded the compiler, which takes a second.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    names = [name for name in BRANCHES if hasattr(torch, name)]
    branches = Patches([(torch, name, _compiling(getattr(torch, name))) for name in names])
    with torch.compiler.set_stance("force_eager"), branches:
        yield


def _compiling(branch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch as it is without `uncompiled`, which it cannot do without."""

    def compiling(*args: Any, **kwargs: Any) -> Any:
        # A compiler takes along the methods that it finds, and refuses what asks for the thread.
        with torch.compiler.set_stance("default"), as_before(nn.Module):
            return branch(*args, **kwargs)

    return compiling


def written_function(value: Any) -> Any:
    """Return the function or bound method that a compiled one was made from; None for others."""
    if not isinstance(value, FunctionType):  # nothing is asked of what may refuse all questions
        return None
    written: Any = getattr(value, "_torchdynamo_orig_callable", None)
    code = getattr(written, "__code__", None)
    if code is not None and "_dynamo" in Path(code.co_filename).parts:  # around torch's own
        return written.__wrapped__
    return written


def is_optimized(module: Any) -> bool:
    """Whether this is the module that `torch.compile` returns for another one."""
    return type(module).__name__ == "OptimizedModule"


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the paths of the submodules that are compiled, and of those with compiled forwards."""
    return [
        path
        for path, module in model.named_modules()
        if is_optimized(module)
        or module._compiled_call_impl is not None
        or written_function(vars(module).get("forward")) is not None
    ]
