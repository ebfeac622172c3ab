"""Let libraries allocate their lasting workspaces before anything is measured."""

from __future__ import annotations

import torch


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
    with torch.enable_grad():
        made = torch.ones((), device=where, requires_grad=True).clone()
        made.register_hook(lambda _gradient: use_libraries(where))
        made.backward()
