"""How gradients leave a planned step: small autograd Functions, joined by an empty token.

The Functions stand between the outputs and the leaves. Each advances the backward program to its
next hand-over and gives autograd what comes out: hooks, accumulation, optimizers inside backward
and DDP's overlap see what they always see, in eager's order. A rail is laid once and used by step
after step, because making its Functions costs as much as many small operations; only what is laid
to inputs, which change, is laid anew.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from rkgb.run import Places
from rkgb.torch_api import latest_sequence_nr, run_backward, set_sequence_nr
from rockmate.errors import BackwardTwiceError
from rockmate.runtime.shared_uses import Arrivals

OUT_OF_ORDER = (
    "a part of the backward of a Rockmate module was asked for out of order, or after what it "
    "needs was gone. Begin each backward at the module's outputs, with retain_graph=True if parts "
    "of it are run later, or run the forward of that step under `with rockmate.plain():`, as plain "
    "PyTorch."
)


class Advancing(Protocol):
    """A step whose backward can be run from one hand-over to the next."""

    def advance(self, place: int) -> Sequence[Tensor | None]:
        """Return the gradients of hand-over number `place`."""


@dataclass(frozen=True)
class RailPlaces:
    """To which leaves the places of a rail lead: one for each hand-over of a program."""

    leaves: tuple[tuple[str, ...], ...]
    in_sums: bool  # whether later uses of a leaf are added to its first

    @cached_property
    def is_mixed(self) -> str:
        """A leaf with parts at several places, one of which has parts of others, too; or ''."""
        parts = [set(part) for part in self.leaves]
        uses = Counter(leaf for part in parts for leaf in part)
        mixed = (leaf for part in parts if len(part) > 1 for leaf in part if uses[leaf] > 1)
        return next(mixed, "")

    @cached_property
    def read_leaves(self) -> Callable[[Mapping[str, Tensor]], Sequence[Tensor]]:
        """Picks the leaves of all places, one after the other, from the external values."""
        return reader([leaf for part in self.leaves for leaf in part])


class Rail:
    """The Functions of one step at a time, from the token to the leaves of every place."""

    def __init__(
        self,
        layout: RailPlaces,
        leaves: Sequence[Tensor],
        device: torch.device,
        arrivals: Arrivals,
    ) -> None:
        self.layout, self.leaves, self.arrivals = layout, leaves, arrivals
        self.step: weakref.ref[Advancing] | None = None
        self.has_hooks = False
        self.token = torch.empty(0, device=device, requires_grad=True)
        self.tokens = [self.token]  # the way in at each place, and at last behind all
        self._nodes: list[Any] = []
        end = len(leaves)
        for place in reversed(range(len(layout.leaves))):
            start = end - len(layout.leaves[place])
            self.token = _HandOver.apply(self, place, self.token, *leaves[start:end])  # type: ignore[no-untyped-call]
            self.tokens.insert(0, self.token)
            self._nodes.insert(0, self.token.grad_fn)
            end = start
        # What adds up for the first token: only backwards that are for all leaves come to it.
        self.end = self._nodes[-1].next_functions[0][0] if self._nodes else None

    @property
    def start(self) -> Any:
        """The node that a backward comes to first."""
        return self._nodes[0] if self._nodes else self.end

    def fits(self, leaves: Sequence[Tensor]) -> bool:
        """Whether the rail leads to just these tensors, part after part."""
        return all(map(operator.is_, leaves, self.leaves))

    def renew(self, first: int = 0, end: int | None = None) -> None:
        """Let the engine see places of the rail as made now: what was made later runs before."""
        number = latest_sequence_nr() + 1
        for node in self._nodes[first:end]:
            set_sequence_nr(node, number)

    def carry(self, step: Advancing) -> None:
        """Serve this step from now on."""
        self.step = weakref.ref(step)
        for node in self._nodes if self.has_hooks else ():
            node.given = None

    def give_all(self) -> None:
        """Let the step run to its end, and each place keep what it will hand over.

        Who has put hooks on places and keeps the graph may run them one by one, in any order, and
        after the outputs are gone: this is how a backward is split into one for the inputs and one
        for the weights.
        """
        assert self.step is not None
        step = self.step()
        assert step is not None
        for place, node in enumerate(self._nodes):
            node.given = step.advance(place)


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rail: Rail, place: int, token: Tensor, *_leaves: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.rail, ctx.place, ctx.given = weakref.ref(rail), place, None
        return token.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if ctx.given is not None:
            return (None, None, grad, *ctx.given)
        rail = ctx.rail()
        step = None if rail is None or rail.step is None else rail.step()
        if step is None:
            raise BackwardTwiceError(OUT_OF_ORDER)
        return (None, None, grad, *step.advance(ctx.place))


class _HandOverNode(_HandOver._backward_cls):  # type: ignore[name-defined, misc]
    """A node that tells its rail of hooks on it: another step must not call them."""

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        self._note()
        return super().register_hook(hook)

    def register_prehook(self, hook: Callable[..., Any]) -> Any:
        rail = self._note()
        if rail is not None and rail.layout.is_mixed:
            rail.arrivals.in_parts = True
            raise BackwardTwiceError(
                "a backward is about to be split in the middle of a Rockmate module that hands the "
                f"gradients of {rail.layout.is_mixed} over in several parts, together with others. "
                "Run the step again: from now on each part is handed over by itself."
            )
        return super().register_prehook(hook)

    def _note(self) -> Rail | None:
        rail: Rail | None = self.rail()
        if rail is not None:
            rail.has_hooks = True
        return rail


_HandOver._backward_cls = _HandOverNode


@functools.cache
def firing_order(count: int, *, is_last: bool) -> tuple[int, ...]:
    """Return in which order the engine comes to the leaves of one place, all of which are complete.

    They are of one priority, and it keeps them in a heap: no order of its own. So it is tried out.
    """
    fired: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [torch.empty(0, requires_grad=True) for _ in range(count)]
        for number, leaf in enumerate(leaves):
            leaf.register_post_accumulate_grad_hook(lambda _, n=number: fired.append(n))
        token = torch.empty(0, requires_grad=True)
        parts = [[], leaves] if not is_last else [leaves]
        for part in parts:
            token = _Trial.apply(token, *part)  # type: ignore[no-untyped-call]
        run_backward([token], [torch.empty(0)])
    return tuple(fired)


class _Trial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, *leaves: Tensor) -> Tensor:
        ctx.count = len(leaves)
        return token.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad, *(torch.empty(0) for _ in range(ctx.count)))


def fired_in_order(places: Places, edges: Sequence[tuple[str, int]]) -> Places:
    """Return the same places, each with its edges so that leaves are come to in eager's order.

    Hooks that are put on leaves after the forward see this order, where nothing else runs beside.
    """
    last = {edges[edge][0]: edge for place in places for edge in sorted(place)}
    found = []
    for number, place in enumerate(places):
        complete = [edge for edge in sorted(place) if last[edges[edge][0]] == edge]
        fired = firing_order(len(complete), is_last=number + 1 == len(places))
        by_slot = dict(zip(fired, complete, strict=True))
        rest = [edge for edge in sorted(place) if last[edges[edge][0]] != edge]
        found.append((*rest, *(by_slot[slot] for slot in range(len(complete)))))
    return tuple(found)


def reader(keys: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """Return what picks the values of many keys at once."""
    if len(keys) > 1:
        return operator.itemgetter(*keys)
    return lambda values: tuple([values[key] for key in keys])
