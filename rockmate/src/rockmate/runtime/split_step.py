"""A step some of whose outputs were computed from others of them: hidden states beside a result.

The user may ask for the gradient of a hidden state, hook it, change it, start a backward from it
or end one there. So its gradient is autograd's, as in plain PyTorch: every output hangs on a
Function of its own. Where the program comes to a hidden state, a knot gives autograd the parts of
its gradient, along edges to the tensor itself. Autograd adds what comes from outside, runs hooks,
and hands the whole to the tensor's own Function; the program goes on with that.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from rkgb.elements import settled
from rkgb.graphs import BackwardKind, Flow, Region, Tangent, ambient_autocast
from rkgb.torch_api import apply_function, current_backward, is_to_run
from rockmate.errors import BackwardTwiceError, UnsupportedModuleError
from rockmate.runtime.executable import Executable, plain_strides
from rockmate.runtime.hung_step import HungStep, Output
from rockmate.runtime.rails import OUT_OF_ORDER


class SplitStep(HungStep):
    """A forward and its backward, whose gradients of hidden states go by way of autograd."""

    at: int | None = None  # the hidden state that the program waits for the gradient of
    taken = 0  # how many hand-overs of the program have been
    backward = -1  # number of autograd's backward that has started it
    key: Key  # of what has begun the backward
    kind: BackwardKind  # and of which kind it is expected to be
    early: dict[int, tuple[Tensor | None, ...]]  # what places of the rail will give
    seen: dict[int, Tangent]  # how the gradients of hidden states have come
    noisy: set[int]  # those that have come from outside, too
    parts: dict[int, list[Tensor | None]]  # of gradients, which are to be given
    given: dict[int, set[int]]  # storages of all that were, by place of the root

    # ------------------------------------------------------------------ forward

    def connect(self, found: list[Tensor]) -> None:
        """Put in the place of each output what hangs on a Function of its own, with its knots."""
        self.early, self.parts = {}, {}
        rail = self.rail
        assert rail is not None
        knots: list[tuple[Tensor, ...]] = [()] * len(self.executable.flows)
        end = len(rail.tokens)

        def come_to(place: int) -> None:  # what is made later runs before, and so on
            nonlocal end
            if place < end:
                rail.renew(place, end)
                end = place

        for tie in self.laid.ties:
            place = tie.place
            come_to(tie.after)
            edges = [rail.tokens[tie.after], *(knot for to in tie.reaches for knot in knots[to])]
            tensor = apply_function(Output, self, place, found[tie.output], *edges)
            found[tie.output] = tensor
            if tie.knots:
                self.nodes[place] = weakref.ref(tensor.grad_fn)
            made: list[Tensor] = []
            for before, parts in reversed(tie.knots):
                come_to(before)
                is_last = not made
                made.append(apply_function(_Knot, self, place, is_last, *[tensor] * parts))
            knots[place] = tuple(made)
        come_to(0)

    # ------------------------------------------------------------------ backward

    def arrive(self, place: int, grad: Tensor | None) -> Sequence[Tensor | None]:
        """Take the gradient of an output; its parts for others go by way of knots."""
        self.carried()
        if grad is not None:
            self.come[place] = settled(grad)
        return ()

    @property
    def is_over(self) -> bool:
        """Whether the program has handed over all."""
        return self.taken == len(self.runs.received)

    def reach(self, place: int, many: int, *, is_last: bool) -> Sequence[Tensor | None]:
        """Run the program to a hidden state; return as many parts of its gradient, or what is left.

        All of them have been given once the program waits for the whole.
        """
        self.go_on()
        found = self.parts.setdefault(place, [])
        if self.program is not None and place in self.runs.received[self.taken :]:
            while self.at != place and (is_last or len(found) < many) and self.may_take():
                self.take()
        taken = tuple(found[:many])
        del found[:many]
        return taken

    def advance(self, place: int) -> Sequence[Tensor | None]:
        """Run the program to its next hand-over; return the gradients of number `place`."""
        self.go_on()
        if self.program is None:
            raise BackwardTwiceError(OUT_OF_ORDER)
        assert self.rail is not None
        leaves = self.rail.layout.leaves
        found = self.found_at(place) or (None,) * len(leaves[place])
        if place + 1 == len(leaves):
            if self.watch is not None and self.is_over:
                self.watch.finish()
            self.finish()
        return found

    def go_on(self) -> None:
        """Look at what has come: the program waits for it, or it begins another backward."""
        if not self.come:
            return
        number = current_backward()
        if self.program is not None:
            runs, waits = self.runs, {*self.runs.received[self.taken :], self.at}
            is_same = number == self.backward
            if is_same and self.come.keys() <= waits:
                self._compare()
                return
            # The parts of a hidden state were asked for, and a backward begins from there.
            if self.come.keys() == {self.at} and runs.is_separated(self.taken - 1):
                self.backward = number
                self._compare()
                return
            if is_same:
                self._refuse()
        self.take_back_kept()
        self.program, self.at, self.backward = None, None, number
        self.seen, self.noisy, self.given = {}, set(), {}
        self.early.clear()
        self.parts.clear()
        strides = {p: plain_strides(g.shape, g.stride()) for p, g in self.come.items()}
        self.key, kind = self._expected(strides)
        tops = [place for place in sorted(self.come) if not self.executable.flows[place].uses]
        self.begin(kind, [self.come.pop(place) for place in tops])
        self.kind = self.executable.kind

    def _expected(self, strides: Mapping[int, Tangent]) -> tuple[Key, BackwardKind]:
        """Return what backward these gradients begin, by what came last in such a one."""
        tops = {place for place, flow in enumerate(self.executable.flows) if not flow.uses}
        called = None  # hidden states that this backward comes to; None: all that are there
        if not tops <= strides.keys():
            nodes = {place: node() for place, node in self.nodes.items()}
            called = frozenset(
                p
                for p, node in nodes.items()
                if node and self.executable.flows[p].uses and is_to_run(node)
            )
        key = (ambient_autocast(), tuple(sorted(strides.items())), called)
        last = self.backwards.came.get(key)
        if last is None:
            return key, self._kind_for(strides, called)
        outside = {*(last.outside or ())}
        fits = (k for k in self._known_kinds() if k == replace(last, outside=k.outside))
        return key, next((kind for kind in fits if outside <= {*(kind.outside or ())}), last)

    def _known_kinds(self) -> list[BackwardKind]:
        """Return kinds of split backwards, that which this forward was made for first.

        Also because it may have room for more.
        """
        kinds = (self.executable.kind, *self.backwards.variants)
        return [kind for kind in kinds if kind.is_split]

    def _kind_for(
        self, strides: Mapping[int, Tangent], called: frozenset[int] | None
    ) -> BackwardKind:
        """Return a kind of backward that these gradients may begin, a known one if there is any."""
        flows, autocast = self.executable.flows, ambient_autocast()
        outside = {place for place in strides if flows[place].uses}
        gets = _reached(flows, strides) | (called or frozenset()) | strides.keys()

        def serves(kind: BackwardKind) -> bool:
            pairs = enumerate(kind.tangents)
            return (
                kind.autocast == autocast
                and outside <= {*(kind.outside or ())}
                and all((tangent is not None) == (place in gets) for place, tangent in pairs)
                and all(kind.tangents[place] == found for place, found in strides.items())
            )

        if (known := next(filter(serves, self._known_kinds()), None)) is not None:
            return known
        tangents = {**dict.fromkeys(range(len(flows))), **strides}
        for place in (called or frozenset()) - _reached(flows, strides) - strides.keys():
            tangents[place] = self.executable.usual_tangent(place)
            outside.add(place)
        found = tuple(tangents[place] for place in range(len(flows)))
        return BackwardKind(found, autocast, tuple(sorted(outside)))

    def _compare(self) -> None:
        """Compare what has come with what the program was made for."""
        for place, grad in list(self.come.items()):
            strides = plain_strides(grad.shape, grad.stride())
            if place == self.at and grad.untyped_storage()._cdata not in self.given[place]:
                self.noisy.add(place)
            self.seen[place] = strides
            if strides == self.executable.kind.tangents[place]:
                continue
            if place != self.at or not self.runs.is_separated(self.taken - 1):
                self._refuse()
            self._begin_at(place, strides)

    def _begin_at(self, place: int, strides: Tangent) -> None:
        """Go on with a backward that begins from a hidden state, as it lies otherwise."""
        kind = self._kind_for({place: strides}, frozenset())
        self.program, self.at = None, None
        assert self.variant is not None
        self.run_again_as(kind, self.backwards.for_backward(kind, self.variant))
        self.run_backward_of(self.executable, [])

    def _refuse(self) -> NoReturn:
        self._learn()
        raise UnsupportedModuleError(
            "gradients have arrived at outputs of a Rockmate module in another way than before, "
            "and what was computed on the way does not serve for them. Run the step again: it is "
            "planned for such gradients from now on."
        )

    def _learn(self) -> None:
        """Expect next time what has come this time."""
        pairs = enumerate(self.kind.tangents)
        tangents = tuple(self.seen.get(place, tangent) for place, tangent in pairs)
        outside = tuple(sorted({*(self.kind.outside or ()), *self.noisy}))
        self.backwards.came[self.key] = BackwardKind(tangents, self.kind.autocast, outside)

    # ------------------------------------------------------------------ the program

    def run_backward_of(self, executable: Executable, given: list[Tensor]) -> None:
        """Begin the backward of an executable, for which everything is there."""
        self.taken, self.at, self.sent = 0, None, None
        super().run_backward_of(executable, given)

    def let_go(self) -> None:
        """Keep what is needed while gradients of hidden states may come otherwise."""

    def run(self, give: int) -> tuple[Tensor | None, ...]:
        """Run the program to its next hand-over; return what that gives."""
        if self.at is not None:
            self.sent = [self.come.pop(self.at)]
            self.at = None
        found = super().run(give)
        self.sent = None
        self.taken = give + 1
        place = self.runs.outputs_given[give]
        if place is not None:
            self.at = self.runs.received[give]
            storages = {part.untyped_storage()._cdata for part in found if part is not None}
            self.given.setdefault(place, set()).update(storages)
            self.parts.setdefault(place, []).extend(found)
            return ()
        return found

    def may_take(self) -> bool:
        """Whether the program can run on by itself: not without the gradient that it waits for."""
        return self.at is None or self.at in self.come

    def found_at(self, place: int) -> tuple[Tensor | None, ...]:
        """Return what the program gives at a place of the rail."""
        while place not in self.early and not self.is_over:
            if not self.may_take():
                assert self.at is not None
                self.seen[self.at] = None  # nothing has come
                self._refuse()
            self.take()
        return self.early.pop(place, ())

    def take(self) -> None:
        give = self.taken
        found = self.run(give)
        if self.runs.outputs_given[give] is not None:
            return
        place = self.runs.rail_place(give)
        if self.watch is not None:
            self.watch.look(place, found)
        if before := self.early.get(place):  # of a program that was left on its way
            found = tuple([b if b is not None else f for b, f in zip(before, found, strict=True)])
        self.early[place] = found

    def give_all(self) -> None:
        """Give nothing beforehand: what comes after a hidden state's gradient is made with that."""

    def finish(self) -> None:
        """Remember how gradients came, and end."""
        self._learn()
        super().finish()
        if self.kept is None:
            super().let_go()


Key = tuple[Region | None, tuple[tuple[int, Tangent], ...], frozenset[int] | None]


def _reached(flows: Sequence[Flow], starts: Iterable[int]) -> set[int]:
    """Return the outputs that others, which a backward begins from, were computed from."""
    found: set[int] = set()
    waiting = list(starts)
    while waiting:
        new = {*flows[waiting.pop()].reaches} - found
        found |= new
        waiting += new
    return found


class _Knot(torch.autograd.Function):
    """Leads to a hidden state: its backward returns the parts of its gradient."""

    @staticmethod
    def forward(ctx: Any, step: SplitStep, place: int, is_last: bool, *edges: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.step, ctx.place, ctx.is_last, ctx.edges = step, place, is_last, len(edges)
        return torch.empty(0, device=edges[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Any, ...]:
        parts = ctx.step.reach(ctx.place, ctx.edges, is_last=ctx.is_last)
        return (None, None, None, *parts, *(None,) * (ctx.edges - len(parts)))
