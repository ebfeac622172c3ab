"""In which order autograd's engine visits the leaves of one node of a backward."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor

from rkgb.torch_api.private.autograd import run_backward


@functools.cache
def firing_order(count: int, before: Literal["node", "leaf", "nothing"]) -> tuple[int, ...]:
    """Return the order in which the engine visits the leaves of one node.

    They have equal priority in the engine's heap, so the order is found by a trial. The node gives
    the first of its gradients to what is `before` them: another node, or another leaf.
    """
    fired: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [torch.empty(0, requires_grad=True, device="cpu") for _ in range(count)]
        for number, leaf in enumerate(leaves):
            leaf.register_post_accumulate_grad_hook(lambda _, n=number: fired.append(n))
        token = torch.empty(0, requires_grad=before != "nothing", device="cpu")
        parts = [[], leaves] if before == "node" else [leaves]
        for part in parts:
            token = _Trial.apply(token, *part)  # type: ignore[no-untyped-call]
        run_backward([token], [torch.empty(0, device="cpu")])
    return tuple(fired)


class _Trial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, *leaves: Tensor) -> Tensor:
        ctx.count = len(leaves)
        return token.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad, *(torch.empty(0, device="cpu") for _ in range(ctx.count)))
