"""Wrapper subclasses of tensors: distributed tensors, and results of asynchronous collectives.

A distributed tensor has the shape of the whole and the memory of its local part. The result of an
asynchronous collective may not exist yet. Torch waits for it at the next dispatch, but a kernel
that is called directly does not: its caller has to wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def memory_of(tensor: Tensor) -> Tensor:
    """Return the tensor that owns the memory: the innermost wrapped one, or the tensor itself."""
    while type(tensor) not in _PLAIN and (inner := _inside(tensor)) is not None:
        tensor = inner[1]
    return tensor


def wrapper_of(tensor: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return a function that wraps another local tensor as this one is wrapped.

    None for a plain tensor. The wrapper of an asynchronous result is left out.
    """
    if type(tensor) in _PLAIN or (inner := _inside(tensor)) is None:
        return None
    if is_running(tensor):
        return wrapper_of(inner[1])
    kind: Any = type(tensor)
    names, spec = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(tensor, name) for name in names if name != inner[0]}
    size, stride, deeper = tensor.size(), tensor.stride(), wrapper_of(inner[1])

    def wrap(part: Tensor) -> Tensor:
        whole = part if deeper is None else deeper(part)
        made: Tensor = kind.__tensor_unflatten__({**parts, inner[0]: whole}, spec, size, stride)
        return made

    return wrap


def lazy_bits(tensor: Tensor) -> tuple[bool, bool]:
    """Return whether reads of a tensor conjugate, and whether they negate, what its memory holds.

    Examples:
        >>> lazy_bits(torch.ones(2, dtype=torch.complex64).conj())
        (True, False)
    """
    return tensor.is_conj(), tensor.is_neg()


def read_lazily(tensor: Tensor, bits: tuple[bool, bool]) -> Tensor:
    """Return a view of the same memory whose reads conjugate and negate as `bits` say."""
    is_conj, is_neg = lazy_bits(tensor)
    tensor = tensor if is_conj == bits[0] else torch._conj(tensor)
    return tensor if is_neg == bits[1] else torch._neg_view(tensor)


def is_running(value: Any) -> bool:
    """Return whether a value is the result of a collective that may still run."""
    return (
        type(value) not in _PLAIN and isinstance(value, Tensor) and hasattr(value, "trigger_wait")
    )


def settled(value: Any) -> Any:
    """Wait for the result of a collective and return it; return any other value unchanged."""
    if not is_running(value):
        return value
    if torch.is_grad_enabled() and value.requires_grad:
        return _Settled.apply(value)  # type: ignore[no-untyped-call]
    return value.trigger_wait()


def _inside(tensor: Tensor) -> tuple[str, Tensor] | None:
    """Return name and value of the one tensor that this one wraps, or None."""
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
