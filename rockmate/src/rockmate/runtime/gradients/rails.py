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
from torch import Tensor, nn

from rkgb.run import Places
from rkgb.torch_api import (
    any_is_freed,
    current_dispatch_modes,
    firing_order,
    is_to_run,
    keeps_graph,
    latest_sequence_nr,
    nodes_outlive_tensors,
    refuse_unused,
    set_sequence_nr,
)
from rockmate.errors import BackwardTwiceError, UnsupportedModuleError
from rockmate.runtime.gradients.shared_uses import ArrivalOrder

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
    def crowded(self) -> tuple[range, ...]:
        """The numbers of the leaves of each place with so many that the engine's heap orders them.

        It visits up to two in order.
        """
        firsts = accumulate(map(len, self.leaves), initial=0)
        pairs = zip(firsts, self.leaves, strict=False)
        return tuple(range(first, first + len(part)) for first, part in pairs if len(part) > 2)

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
        arrivals: ArrivalOrder,
        stream: int = 0,
        *,
        lasts: bool = False,
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
            self.token = _HandOver.apply(self, place, self.token, *leaves[start:end])  # type: ignore[no-untyped-call]
            self.tokens.insert(0, self.token)
            self._nodes.insert(0, self.token.grad_fn)
            end = start
        if self._nodes and type(self._nodes[0]) is not _HandOverNode:
            refuse_unused("torch.autograd.Function._backward_cls", "to see hooks on its nodes")
        # Accumulates for the first token. Only backwards for all leaves reach it.
        self.end = self._nodes[-1].next_functions[0][0] if self._nodes else None
        ends = [leaves[first] for first in {0, *self._firsts[-2:-1]} if first < len(leaves)]
        self._added_at = [(leaf, _accumulator(leaf)) for leaf in ends if _is_own(leaf)]
        self._have_moved = _watched(leaves) if lasts else None

    @property
    def start(self) -> Any:
        """The node that a backward reaches first."""
        return self._nodes[0] if self._nodes else self.end

    def fits(self, leaves: Sequence[Tensor], stream: int) -> bool:
        """Whether the rail leads to just these tensors, part after part, on a stream.

        Gradients of one that was converted (`model.double().float()`) add up elsewhere from then
        on, and it has other memory, which is looked at. Memory may have been put back by hand
        (`p.data = saved`). To ask where gradients of all add up takes as long as to make a rail:
        one leaf of the first place and one of the last are asked.
        """
        if stream != self.stream or not all(map(operator.is_, leaves, self.leaves)):
            return False
        if self._have_moved is None or self._have_moved():
            return False
        if current_dispatch_modes():  # which would see how this is asked
            return True
        return all(_accumulator(leaf) is node for leaf, node in self._added_at)

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

    def refuse_late_hooks(self) -> None:
        """Refuse a backward for some leaves only that would call hooks in another order than eager.

        Hooks that are there before the forward get a place for each leaf.

        Raises:
            UnsupportedModuleError: two leaves of a place have got hooks since.
        """
        if not self.layout.crowded or is_to_run(self.end):
            return
        for part in self.layout.crowded:
            leaves: list[Any] = [self.leaves[number] for number in part]
            hooked = {id(t) for t in leaves if t._backward_hooks or t._post_accumulate_grad_hooks}
            if len(hooked) > 1:
                raise UnsupportedModuleError(
                    "hooks were put on parameters between the forward of a Rockmate module and a "
                    "backward for some tensors only (torch.autograd.grad, or inputs=...), which "
                    "would call them in another order than plain PyTorch. Put hooks on before the "
                    "forward, or run the step again."
                )

    def pass_over(self, place: int, given: Sequence[Tensor | None]) -> None:
        """Let no hook of a leaf be called with None: plain PyTorch comes to no such leaf."""
        for slot, grad in enumerate(given):
            if grad is not None:
                continue
            leaf = self.leaves[self._firsts[place] + slot]
            for kind, found in (
                (_PassedOver, leaf._backward_hooks),
                (_PassedOverAfter, leaf._post_accumulate_grad_hooks),
            ):
                hooks: Any = found
                for key, hook in [*hooks.items()] if hooks else ():
                    if not isinstance(hook, _PassedOver):
                        hooks[key] = kind(hooks, key, hook, leaf)

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
            if not nodes_outlive_tensors():
                node.held = self


class _PassedOver:
    """Stands for a hook of a tensor, at its next call, and leaves it out if no gradient comes."""

    def __init__(self, hooks: MutableMapping[int, Any], key: int, hook: Any, leaf: Tensor) -> None:
        self.hooks, self.key, self.hook = hooks, key, hook
        self.only_watches = getattr(hook, "only_watches", False)
        self.before = _gradient_of(leaf)

    def __call__(self, given: Tensor | None) -> Any:
        if self.key in self.hooks:
            self.hooks[self.key] = self.hook
        return self.hook(given) if self.has_come(given) else None

    def has_come(self, given: Tensor | None) -> bool:
        """Return whether there is a gradient."""
        return given is not None


class _PassedOverAfter(_PassedOver):
    """The same for a hook after a leaf has its gradient, which is called with the leaf."""

    def has_come(self, given: Tensor | None) -> bool:
        """Return whether anything was added to its gradient since."""
        return given is None or _gradient_of(given) != self.before


def _gradient_of(leaf: Tensor) -> tuple[int, int]:
    grad = leaf.grad
    return (0, 0) if grad is None else (id(grad), grad._version)


def _is_own(leaf: Tensor) -> bool:
    return type(leaf) in (Tensor, nn.Parameter) and leaf.is_leaf and leaf.requires_grad


def _watched(leaves: Sequence[Tensor]) -> Callable[[], bool]:
    """Return a function that tells whether one of these has got other memory since."""
    own = [t for t in leaves if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided]
    # The memory of all of them is not freed when one leaves it.
    parts = [t for t in own if t.untyped_storage().nbytes() > t.nbytes]
    places = [*map(Tensor.data_ptr, parts)]
    one_is_freed = any_is_freed(t.untyped_storage() for t in own)
    return lambda: one_is_freed() or [*map(Tensor.data_ptr, parts)] != places


def _accumulator(leaf: Tensor) -> Any:
    """Return the node at which gradients of a leaf add up; None where it wants none."""
    way: Any = leaf.view_as(leaf).grad_fn
    return None if way is None else way.next_functions[0][0]


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
        if ctx.held is not None and not keeps_graph():
            ctx.held = None
        if rail is not None:
            rail.pass_over(ctx.place, given)
        return (None, None, grad, *given)


class _HandOverNode(_HandOver._backward_cls):  # type: ignore[name-defined, misc]
    """A node that notes hooks on it in its rail, because another step must not call them."""

    held: Rail | None = None  # what keeps it usable, until it runs for the last time

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


def fired_in_order(places: Places, edges: Sequence[tuple[str, int]]) -> Places:
    """Return the same places with edges ordered so that the engine visits leaves in eager's order.

    Hooks that are put on leaves after the forward see this order, if nothing else runs in between.
    """
    last = {edges[edge][0]: edge for place in places for edge in sorted(place)}
    found = []
    for number, place in enumerate(places):
        complete = [edge for edge in sorted(place) if last[edges[edge][0]] == edge]
        fired = firing_order(len(complete), "leaf" if number + 1 == len(places) else "node")
        by_slot = dict(zip(fired, complete, strict=True))
        rest = [edge for edge in sorted(place) if last[edges[edge][0]] != edge]
        found.append((*rest, *(by_slot[slot] for slot in range(len(complete)))))
    return tuple(found)


def reader(keys: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """Return a function that picks the values of all keys at once."""
    if len(keys) > 1:
        return operator.itemgetter(*keys)
    return lambda values: tuple([values[key] for key in keys])
