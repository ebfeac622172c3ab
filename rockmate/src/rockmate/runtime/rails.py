"""How gradients leave a planned step: small autograd Functions, joined by an empty token.

The Functions stand between the outputs and the leaves. Each advances the backward program to its
next hand-over and gives autograd what comes out: hooks, accumulation, optimizers inside backward
and DDP's overlap see what they always see, in eager's order. A rail is laid once and used by step
after step, because making its Functions costs as much as many small operations; only what is laid
to inputs, which change, is laid anew.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from rkgb.torch_api import latest_sequence_nr, set_sequence_nr


class Advancing(Protocol):
    """A step whose backward can be run from one hand-over to the next."""

    def advance(self, place: int) -> Sequence[Tensor | None]:
        """Return the gradients of hand-over number `place`."""


@dataclass(frozen=True)
class RailPlaces:
    """To which leaves the places of a rail lead: one for each hand-over of a program."""

    leaves: tuple[tuple[str, ...], ...]
    in_sums: bool  # whether later uses of a leaf are added to its first

    def with_others(self, leaves: Sequence[str]) -> RailPlaces:
        """Return a layout that leads to these leaves once more.

        The program gives them fewer parts than there may be: gradients may arrive otherwise than
        expected. A part more comes with the last one, or in the end.
        """
        if not leaves:
            return self
        places = [list(part) for part in self.leaves] or [[]]
        last = {leaf: part for part in places for leaf in part}
        for leaf in leaves:
            last.get(leaf, places[-1]).append(leaf)
        return replace(self, leaves=tuple(map(tuple, places)))

    @cached_property
    def read_leaves(self) -> Callable[[Mapping[str, Tensor]], Sequence[Tensor]]:
        """Picks the leaves of all places, one after the other, from the external values."""
        return reader([leaf for part in self.leaves for leaf in part])


class Rail:
    """The Functions of one step at a time, from the token to the leaves of every place."""

    def __init__(self, layout: RailPlaces, leaves: Sequence[Tensor], device: torch.device) -> None:
        self.layout, self.leaves = layout, leaves
        self.step: weakref.ref[Advancing] | None = None
        self.token = torch.empty(0, device=device, requires_grad=True)
        self._nodes = []
        end = len(leaves)
        for place in reversed(range(len(layout.leaves))):
            start = end - len(layout.leaves[place])
            self.token = _HandOver.apply(self, place, self.token, *leaves[start:end])  # type: ignore[no-untyped-call]
            self._nodes.append(self.token.grad_fn)
            end = start

    def fits(self, leaves: Sequence[Tensor]) -> bool:
        """Whether the rail leads to just these tensors, part after part."""
        return all(map(operator.is_, leaves, self.leaves))

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


def reader(keys: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """Return what picks the values of many keys at once."""
    if len(keys) > 1:
        return operator.itemgetter(*keys)
    return lambda values: tuple([values[key] for key in keys])
