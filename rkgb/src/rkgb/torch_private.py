"""The private names of torch that this package needs, each once, with what it is for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def current_autograd_node() -> Any:
    """Return the node that the engine is running in this thread, or None."""
    return torch._C._current_autograd_node()


def latest_sequence_nr() -> int:
    """Return the number of the autograd node that was made last in this thread."""
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]


def _keys_above_kernels() -> Any:
    key = torch._C.DispatchKey
    above = ("Autograd", "Autocast")
    names = [n for n in dir(key) if n.startswith(above) and n != "AutogradFunctionality"]
    keys = torch._C.DispatchKeySet(key.ADInplaceOrView)
    for name in names:
        keys = keys | torch._C.DispatchKeySet(getattr(key, name))
    return keys


_ABOVE_KERNELS = _keys_above_kernels()


def straight_to_kernels() -> AbstractContextManager[Any]:
    """While active, operations are neither recorded nor cast, and views and versions not kept."""
    return torch._C._ExcludeDispatchKeyGuard(_ABOVE_KERNELS)


def set_sequence_nr(node: Any, number: int) -> None:
    """Let the engine treat a node of autograd as if it had been made at another time."""
    node._set_sequence_nr(number)


def binding_places() -> tuple[Any, ...]:
    """Return where torch keeps its generated Python bindings, the fastest first."""
    c = torch._C
    return (c.TensorBase, c._VariableFunctions, c._nn, c._linalg, c._fft, c._special)  # type: ignore[attr-defined]


def set_grad_mode(enabled: bool) -> None:
    """Switch grad mode, without the object that `torch.set_grad_enabled` makes for it."""
    torch._C._set_grad_enabled(enabled)
