"""Let libraries allocate their lasting workspaces before anything is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def autograd_thread_runs(call: Callable[[], object], where: torch.device) -> None:
    """Run a call in the thread that runs backwards on a device."""
    with torch.enable_grad():
        start = torch.ones((), device=where, requires_grad=True)
        _Within.apply(start, call).backward()  # type: ignore[no-untyped-call]


class _Within(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, call: Callable[[], object]) -> Tensor:
        ctx.call = call
        return start.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.call()
        return grad, None


def use_libraries(where: torch.device) -> None:
    """Multiply matrices as layers do, so that cuBLAS and cuBLASLt allocate their workspaces."""
    with torch.no_grad():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            matrix = torch.ones(64, 64, device=where, dtype=dtype)
            torch.addmm(matrix[0], matrix, matrix)
            torch.bmm(matrix[None], matrix[None])


def warm_up_threads(where: torch.device) -> None:
    """Use the libraries in this thread and in the one that runs backwards."""
    use_libraries(where)
    autograd_thread_runs(lambda: use_libraries(where), where)
