"""How gradients leave a planned step: a rail, which is a chain of autograd Functions.

The Functions lie between the outputs and the leaves, and an empty tensor, the token, connects them.
Each one is a place of the rail. Its backward advances the backward program to the next hand-over
and returns the resulting gradients. So hooks, accumulation, optimizers inside backward and DDP's
overlap work as usual, in eager's order. Making the Functions costs as much as many small
operations, so a rail is made once and used by step after step; only places of inputs, which change,
are made anew.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from rkgb.torch_api import latest_sequence_nr, refuse_unused, set_sequence_nr
from rockmate.errors import BackwardTwiceError
from rockmate.runtime.gradients.shared_uses import Arrivals

_FIRST = 1 << 62  # above the sequence number of any node
OUT_OF_ORDER = (
    "a part of the backward of a Rockmate module was asked for out of order, or after what it "
    "needs was gone. Begin each backward at the module's outputs, with retain_graph=True if parts "
    "of it are run later, or run the forward of that step under `with rockmate.plain():`, as plain "
    "PyTorch."
)


class Advancing(Protocol):
    """A step whose backward runs from one hand-over to the next."""

    def advance(self, place: int) -> Sequence[Tensor | None]:
        """Return the gradients of hand-over number `place`."""


@dataclass(frozen=True)
class RailPlaces:
    """The leaves of each place of a rail; a place is a hand-over of a program."""

    leaves: tuple[tuple[str, ...], ...]
    in_sums: bool  # whether later uses of a leaf are added to its first

    @cached_property
    def is_mixed(self) -> str:
        """A leaf with parts at several places, one of which also serves other leaves; or ''."""
        parts = [set(part) for part in self.leaves]
        uses = Counter(leaf for part in parts for leaf in part)
        mixed = (leaf for part in parts if len(part) > 1 for leaf in part if uses[leaf] > 1)
        return next(mixed, "")

    @cached_property
    def read_leaves(self) -> Callable[[Mapping[str, Tensor]], Sequence[Tensor]]:
        """Picks the leaves of all places, in order, from the external values."""
        return reader([leaf for part in self.leaves for leaf in part])


class Rail:
    """The Functions of one step at a time, from the token to the leaves of every place."""

    def __init__(
        self,
        layout: RailPlaces,
        leaves: Sequence[Tensor],
        device: torch.device,
        arrivals: Arrivals,
        stream: int = 0,
    ) -> None:
        self.layout, self.leaves, self.arrivals = layout, leaves, arrivals
        self.stream = stream  # on which the engine will run it: nodes keep that of their making
        self.step: weakref.ref[Advancing] | None = None
        self.has_hooks = False
        self.token = torch.empty(0, device=device, requires_grad=True)
        self.tokens = [self.token]  # the token before each place, and after the last one
        self._nodes: list[Any] = []
        self._firsts = [*accumulate(map(len, layout.leaves), initial=0)]  # leaves before each place
        end = len(leaves)
        for place in reversed(range(len(layout.leaves))):
            start = end - len(layout.leaves[place])
            self.token = _HandOver.apply(self, place, self.token, *_in_turn(leaves[start:end]))  # type: ignore[no-untyped-call]
            self.tokens.insert(0, self.token)
            self._nodes.insert(0, self.token.grad_fn)
            end = start
        if self._nodes and type(self._nodes[0]) is not _HandOverNode:
            refuse_unused("torch.autograd.Function._backward_cls", "to see hooks on its nodes")
        # Accumulates for the first token. Only backwards for all leaves reach it.
        self.end = self._nodes[-1].next_functions[0][0] if self._nodes else None

    @property
    def start(self) -> Any:
        """The node that a backward reaches first."""
        return self._nodes[0] if self._nodes else self.end

    def fits(self, leaves: Sequence[Tensor], stream: int) -> bool:
        """Whether the rail leads to just these tensors, part after part, on a stream."""
        return stream == self.stream and all(map(operator.is_, leaves, self.leaves))

    def renew(self, first: int = 0, end: int | None = None) -> None:
        """Give places of the rail new sequence numbers: the engine runs later nodes first."""
        number = latest_sequence_nr() + 1
        for node in self._nodes[first:end]:
            set_sequence_nr(node, number)

    def carry(self, step: Advancing) -> None:
        """Use the rail for this step."""
        self.step = weakref.ref(step)
        for node in self._nodes if self.has_hooks else ():
            node.given = None

    def pass_over(self, place: int, given: Sequence[Tensor | None]) -> None:
        """Let no hook of a leaf be called with None: plain PyTorch comes to no such leaf."""
        for slot, grad in enumerate(given):
            if grad is not None:
                continue
            hooks: Any = self.leaves[self._firsts[place] + slot]._backward_hooks
            for key, hook in [*hooks.items()] if hooks else ():
                if not isinstance(hook, _PassedOver):
                    hooks[key] = _PassedOver(hooks, key, hook)

    def give_all(self) -> None:
        """Run the step to its end, and store at each place the gradients that it will return.

        Code that has hooks on places and retains the graph may run them one by one, in any order,
        and after the outputs are gone. In this way a backward is split into one for the inputs and
        one for the weights.
        """
        assert self.step is not None
        step = self.step()
        assert step is not None
        for place, node in enumerate(self._nodes):
            node.given = step.advance(place)


class _PassedOver:
    """Stands for a hook of a tensor, at its next call, and leaves it out if no gradient comes."""

    def __init__(self, hooks: MutableMapping[int, Any], key: int, hook: Any) -> None:
        self.hooks, self.key, self.hook = hooks, key, hook

    def __call__(self, grad: Tensor | None) -> Any:
        if self.key in self.hooks:
            self.hooks[self.key] = self.hook
        return None if grad is None else self.hook(grad)


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rail: Rail, place: int, token: Tensor, *_leaves: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.rail, ctx.place, ctx.given = weakref.ref(rail), place, None
        return token.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        rail, given = ctx.rail(), ctx.given
        if given is None:
            step = None if rail is None or rail.step is None else rail.step()
            if step is None:
                raise BackwardTwiceError(OUT_OF_ORDER)
            given = step.advance(ctx.place)
        if rail is not None:
            rail.pass_over(ctx.place, given)
        return (None, None, grad, *given)


class _HandOverNode(_HandOver._backward_cls):  # type: ignore[name-defined, misc]
    """A node that notes hooks on it in its rail, because another step must not call them."""

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


def _in_turn(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return what stands for the leaves of one place, so that they are reached in this order.

    Accumulators have equal priority in the engine's heap. It visits up to two of them in order; the
    order of more depends on what else is in it.
    """
    if len(leaves) < 3 or any(leaf.layout is not torch.strided for leaf in leaves):
        return leaves
    found = [torch.ops.aten.alias(leaf) for leaf in leaves]
    for number, link in enumerate(found):
        set_sequence_nr(link.grad_fn, _FIRST - number)
    return found


def reader(keys: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """Return a function that picks the values of all keys at once."""
    if len(keys) > 1:
        return operator.itemgetter(*keys)
    return lambda values: tuple([values[key] for key in keys])
