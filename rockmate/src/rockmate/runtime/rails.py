"""How gradients leave a planned step: small autograd Functions, joined by an empty token.

The Functions stand between the outputs and the leaves. Each advances the backward program to its
next hand-over and gives autograd what comes out: hooks, accumulation, optimizers inside backward
and DDP's overlap see what they always see, in eager's order. A rail is laid once and used by step
after step, because making its Functions costs as much as many small operations; only what is laid
to inputs, which change, is laid anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rkgb.engine import latest_sequence_nr, set_sequence_nr


class Advancing(Protocol):
    """A step whose backward can be run from one hand-over to the next."""

    def advance(self, place: int) -> Sequence[Tensor | None]:
        """Return the gradients of hand-over number `place`."""


class Rail:
    """The Functions of one step at a time, from the token to the leaves of every hand-over."""

    def __init__(self, leaves: Sequence[Sequence[Tensor]], device: torch.device) -> None:
        self.leaves = [leaf for part in leaves for leaf in part]
        self.step: weakref.ref[Advancing] | None = None
        self.token = torch.empty(0, device=device, requires_grad=True)
        self._nodes = []
        for place in reversed(range(len(leaves))):
            self.token = _HandOver.apply(self, place, self.token, *leaves[place])  # type: ignore[no-untyped-call]
            self._nodes.append(self.token.grad_fn)

    def fits(self, leaves: Sequence[Sequence[Tensor]]) -> bool:
        """Whether the rail leads to just these tensors."""
        wanted = [id(leaf) for part in leaves for leaf in part]
        return wanted == [id(leaf) for leaf in self.leaves]

    def renew(self) -> None:
        """Let the engine see the rail as made now: what was made later runs before it."""
        number = latest_sequence_nr() + 1
        for node in self._nodes:
            set_sequence_nr(node, number)

    def carry(self, step: Advancing) -> None:
        """Serve this step from now on."""
        self.step = weakref.ref(step)


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rail: Rail, place: int, token: Tensor, *_leaves: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.rail, ctx.place = weakref.ref(rail), place
        return token.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        rail = ctx.rail()
        return (None, None, grad, *rail.step().advance(ctx.place))
