"""What torch does not say of some kernels: their FLOPs, and that values decide their workspace.

A workspace that depends on values is measured where it is largest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from rkgb.torch_api.patches import Patches
from rkgb.torch_api.private.modes import DispatchMode

# It holds more matrices the larger their norms are, up to this one.
_BY_NORM, _LARGE = torch.ops.aten.linalg_matrix_exp.default, 8.0
_PLACES = (torch, torch.linalg, Tensor)


def takes_by_values(target: Any) -> bool:
    """Return whether the workspace of a kernel depends on values."""
    return target is _BY_NORM


def taking_most(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments for which a kernel has its largest workspace."""
    return (torch.full_like(args[0], _LARGE),) if takes_by_values(target) else args


class TakingMost(DispatchMode):
    """While active, such kernels run once more, with their largest workspaces."""

    only_watches = True

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if takes_by_values(func):
            func(*taking_most(func, args), **kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def noting_calls() -> Iterator[list[None]]:
    """Give a list that gets an entry for each call of such a kernel from Python."""
    called: list[None] = []
    exponential = torch.matrix_exp

    def noting(matrix: Tensor) -> Tensor:
        called.append(None)
        return exponential(matrix)

    with Patches([(place, "matrix_exp", noting) for place in _PLACES]):
        yield called


def _sdpa_forward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


def _sdpa_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, q, k, v))


# Without them, attention on a CPU would cost nothing. The formulas take shapes.
EXTRA_FLOP_FORMULAS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward,
}


def has_flops(packet: Any) -> bool:
    """Return whether there is a formula for the FLOPs of an operation."""
    return packet in flop_registry or packet in EXTRA_FLOP_FORMULAS


def flops_of(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the FLOPs of a call with these tensors; 0 for an operation without a formula."""
    if packet in EXTRA_FLOP_FORMULAS:
        shapes = [arg.shape for arg in args if isinstance(arg, Tensor)]
        return int(EXTRA_FLOP_FORMULAS[packet](*shapes))
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    return 0


class FlopCounter(DispatchMode):
    """Counts the FLOPs of the operations that run inside.

    Torch's own counter decomposes every operation, which takes ten times as long, and tracks
    modules, with hooks that fail where an input is a leaf of a graph of its own.
    """

    only_watches = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        out = func(*args, **kwargs)
        self.total += flops_of(func.overloadpacket, args, kwargs, out)
        return out
