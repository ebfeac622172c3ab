"""Tensors that are a shell around another: distributed ones, and results of running collectives.

A distributed tensor says it has the whole shape and has the memory of its own part. The result of a
collective may not be there yet: whoever reads its memory must wait, which torch does when such a
tensor is dispatched. Kernels that are called directly know of neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def memory_of(tensor: Tensor) -> Tensor:
    """Return the tensor that has the memory: the innermost of shells, or the tensor itself."""
    while type(tensor) not in _PLAIN and (inner := _inside(tensor)) is not None:
        tensor = inner[1]
    return tensor


def around(tensor: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return what puts the shell of a tensor around another one in its memory's place.

    None for a plain tensor. What runs is waited for, so its shell is left out.
    """
    if type(tensor) in _PLAIN or (inner := _inside(tensor)) is None:
        return None
    if is_running(tensor):
        return around(inner[1])
    kind: Any = type(tensor)
    names, spec = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(tensor, name) for name in names if name != inner[0]}
    size, stride, deeper = tensor.size(), tensor.stride(), around(inner[1])

    def wrap(part: Tensor) -> Tensor:
        whole = part if deeper is None else deeper(part)
        made: Tensor = kind.__tensor_unflatten__({**parts, inner[0]: whole}, spec, size, stride)
        return made

    return wrap


def is_running(value: Any) -> bool:
    """Whether a value is the result of a collective that may still run."""
    return (
        type(value) not in _PLAIN and isinstance(value, Tensor) and hasattr(value, "trigger_wait")
    )


def settled(value: Any) -> Any:
    """Return the plain result of a collective once it is there; anything else as it is."""
    if not is_running(value):
        return value
    if torch.is_grad_enabled() and value.requires_grad:
        return _Settled.apply(value)  # type: ignore[no-untyped-call]
    return value.trigger_wait()


def _inside(tensor: Tensor) -> tuple[str, Tensor] | None:
    """Return the only tensor that another is made of, and its name; None where there is no such."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return None
    found = [(name, getattr(tensor, name)) for name in flatten()[0]]
    tensors = [(name, value) for name, value in found if isinstance(value, Tensor)]
    return tensors[0] if len(tensors) == 1 else None


class _Settled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, running: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        tensor: Tensor = running.trigger_wait()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return grads[0]
