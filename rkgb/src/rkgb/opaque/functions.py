"""Autograd Functions of the user's that compute outside of torch's operations.

A Function that uses torch's operations is recorded like everything else. A Function that computes
in numpy or in its own kernels becomes an opaque call, with its forward and backward as `apply` runs
them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.elements.trees import flatten
from rkgb.errors import SideEffectError
from rkgb.guards.entries import cell_content
from rkgb.opaque.call import Place
from rkgb.opaque.link import Link
from rkgb.opaque.recording import PieceRecorder
from rkgb.torch_api.patches import ForAll
from rkgb.torch_api.private.autograd import latest_sequence_nr

Function = torch.autograd.Function


def function_of(error: BaseException) -> type[Function] | None:
    """Return the Function in whose forward or backward an error arose, or None."""
    seen: BaseException | None = error
    codes = set()
    while seen is not None:
        trace = seen.__traceback__
        while trace is not None:
            codes.add(trace.tb_frame.f_code)
            trace = trace.tb_next
        seen = seen.__cause__
    for kind in _functions(Function):
        if kind.__module__.startswith(("torch.", "rkgb.")):
            continue
        own = (getattr(kind, name, None) for name in ("forward", "backward"))
        if any(getattr(way, "__code__", None) in codes for way in own):
            return kind
    return None


def _functions(kind: type[Function]) -> Iterator[type[Function]]:
    for other in kind.__subclasses__():
        yield other
        yield from _functions(other)


def run_functions_whole(
    pieces: PieceRecorder, functions: Sequence[type[Function]]
) -> list[tuple[Any, str, Any]]:
    """Return replacements that record each call of these Functions as one operation."""
    found: list[tuple[Any, str, Any]] = []
    plain = Function.setup_context
    for kind in functions:
        forward = _forward(pieces, kind)
        if kind.setup_context is not plain:
            forward.elsewhere = _with_context(kind)
        found.append((kind, "forward", staticmethod(forward)))
        found.append((kind, "backward", staticmethod(_backward(pieces))))
        if kind.setup_context is not plain:  # a forward that gets the context has none
            found.append((kind, "setup_context", ForAll(staticmethod(plain))))
    return found


def _with_context(kind: type[Function]) -> Any:
    """Return the forward for other threads, which gets the context during replacements."""
    compute: Any = kind.forward
    setup: Any = kind.setup_context

    def forward(ctx: Any, *args: Any) -> Any:
        result = compute(*args)
        setup(ctx, args, result)
        return result

    return forward


def _forward(pieces: PieceRecorder, kind: type[Function]) -> Any:
    def forward(ctx: Any, *args: Any) -> Any:
        number = latest_sequence_nr()  # of this call's node
        if any(_leads_to_module(arg) for arg in args):
            raise SideEffectError(
                f"cannot run {kind.__name__} as one operation: it is given a module, which every "
                "step must look up anew.",
                module_path=pieces.recorder.places.here()[0],
            )
        with torch.enable_grad():
            piece, made, link = pieces.function(kind, args, number)
        ctx.set_materialize_grads(False)
        ctx.link, ctx.leaves = link, _own_places(args)
        made = [t.detach() for t in made]
        pairs = zip(made, piece.differentiable, strict=True)
        ctx.mark_non_differentiable(*(t for t, differentiable in pairs if not differentiable))
        link.named(made)
        return piece.result(made, ())

    return forward


def _leads_to_module(value: Any, depth: int = 4) -> bool:
    """Return whether an argument is or calls a module: each step would need another one."""
    if isinstance(value, nn.Module):
        return True
    if depth == 0 or isinstance(value, (Tensor, type, int, float, str)):
        return False
    inside: list[Any] = []
    match value:
        case functools.partial():
            inside = [value.func, *value.args, *value.keywords.values()]
        case types.MethodType():
            inside = [value.__self__]
        case types.FunctionType():
            inside = [*map(cell_content, value.__closure__ or ())]
        case list() | tuple():
            inside = list(value)
        case dict():
            inside = list(value.values())
        case _:
            inside = list(getattr(value, "__dict__", {}).values())
    return any(_leads_to_module(part, depth - 1) for part in inside)


def _own_places(args: Sequence[Any]) -> list[int | None]:
    """Return for each argument its number among all tensors (also in lists), or None."""
    found: list[int | None] = []
    count = 0
    for arg in args:
        found.append(count if isinstance(arg, Tensor) else None)
        count += sum(isinstance(leaf, Tensor) for leaf in flatten(arg)[0])
    return found


def _backward(pieces: PieceRecorder) -> Any:
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        link: Link = ctx.link
        kept = zip(grads, link.piece.plain, strict=True)
        tensors = [grad for grad, plain in kept if isinstance(plain, Place)]
        with pieces.recorder.paused(), torch.no_grad():
            found = link.backward(tensors)
        return tuple(None if leaf is None else found[leaf] for leaf in ctx.leaves)

    return backward
