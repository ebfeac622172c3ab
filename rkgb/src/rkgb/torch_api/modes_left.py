"""How torch is set for all that runs later: a forward may leave that otherwise than it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from rkgb.torch_api.kernel_choice import KernelChoice


def _autocast(device: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    def write(value: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(device, value[0])
        torch.set_autocast_dtype(device, value[1])

    return (lambda: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))), write


def _precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by newer names, which are flags
        return None


def _set_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


# Functions that read and set each.
_OTHERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "precision of products": (_precision, _set_precision),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "options of prints": (
        torch._tensor_str.get_printoptions,
        lambda options: torch.set_printoptions(**options),
    ),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "autocast": _autocast("cpu"),
    "autocast of CUDA": _autocast("cuda"),
    "cache of autocast": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
}


class Modes:
    """How torch is set; what is done inside (`with Modes():`) is undone at the end."""

    def __init__(self) -> None:
        self._kernels = KernelChoice.now()
        self._others = {name: read() for name, (read, _) in _OTHERS.items()}

    def __enter__(self) -> Self:
        return self

    def changed(self) -> str:
        """Return the name of what is set otherwise now, or ''."""
        for name, value in self._others.items():
            if _OTHERS[name][0]() != value:
                return name
        now = KernelChoice.now()
        flags = now.flags_unlike(self._kernels.with_order_of(now))
        return f"flag {flags[0][0]}" if flags else ""

    def __exit__(self, *_: object) -> None:
        for name, value in self._others.items():
            if _OTHERS[name][0]() != value:
                _OTHERS[name][1](value)
        self._kernels.with_order_of(KernelChoice.now()).make_current()
