"""A step with hidden states: outputs that other outputs use, whose gradients pass through autograd.

The user may need the gradient of a hidden state, hook it, change it, start a backward from it or
end one there. So its gradient belongs to autograd, as in plain PyTorch, and every output is the
result of its own Function. When the program reaches a hidden state, a Function called a knot gives
autograd the parts of its gradient, along edges to the tensor itself. Autograd adds gradients from
outside, runs hooks, and passes the sum to the tensor's Function. The program continues with that
sum.
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
from rockmate.errors import BackwardTwiceError
from rockmate.runtime.executable import Executable
from rockmate.runtime.gradients.rails import OUT_OF_ORDER
from rockmate.runtime.outputs import plain_strides
from rockmate.runtime.steps.hung_step import HungStep, Output
from rockmate.runtime.steps.running_step import arrived_otherwise


class SplitStep(HungStep):
    """A forward and its backward, with gradients of hidden states that pass through autograd."""

    at: int | None = None  # the hidden state for whose gradient the program waits
    taken = 0  # number of completed hand-overs of the program
    backward = -1  # number of the backward of autograd's that has started it
    key: BackwardKey  # the gradients that have started the backward
    kind: BackwardKind  # the expected kind of this backward
    early: dict[int, tuple[Tensor | None, ...]]  # gradients for later places of the rail
    seen: dict[int, Tangent]  # strides of arrived gradients of hidden states
    noisy: set[int]  # hidden states with a gradient from outside
    parts: dict[int, list[Tensor | None]]  # parts of gradients that are still to be given
    given: dict[int, set[int]]  # storages of given parts, by position of the root

    # ------------------------------------------------------------------ forward

    def connect(self, found: list[Tensor]) -> None:
        """Replace each output by the result of its own Function, and make its knots."""
        self.early, self.parts = {}, {}
        rail = self.rail
        assert rail is not None
        knots: list[tuple[Tensor, ...]] = [()] * len(self.flows)
        end = len(rail.tokens)

        def come_to(place: int) -> None:  # the engine runs nodes that are made later first
            nonlocal end
            if place < end:
                rail.renew(place, end)
                end = place

        for tie in self.laid.outputs.ties:
            place = tie.place
            come_to(tie.after)
            edges = [rail.tokens[tie.after], *(knot for to in tie.reaches for knot in knots[to])]
            if not tie.knots:  # a hidden state must not wait for the program
                inner = self.executable.outputs.inner_before(tie.output)
                edges += [found[other] for other in inner]
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
        """Take the gradient of an output; parts for other outputs pass through knots."""
        self.carried()
        if grad is not None:
            self.come[place] = settled(grad)
        return ()

    @property
    def is_over(self) -> bool:
        """Whether the program has made all hand-overs."""
        return self.taken == len(self.runs.outputs.received)

    def reach(self, place: int, many: int, *, is_last: bool) -> Sequence[Tensor | None]:
        """Run the program to a hidden state; return `many` parts of its gradient, or the rest.

        All parts have been given once the program waits for their sum.
        """
        self.go_on()
        found = self.parts.setdefault(place, [])
        if self.program is not None and place in self.runs.outputs.received[self.taken :]:
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
        """Handle arrived gradients: the program waits for them, or they start another backward."""
        if not self.come:
            return
        number = current_backward()
        if self.program is not None:
            runs, waits = self.runs, {*self.runs.outputs.received[self.taken :], self.at}
            is_same = number == self.backward
            if is_same and self.come.keys() <= waits:
                self._compare()
                return
            # The parts of a hidden state have been given, and a backward starts from there.
            if self.come.keys() == {self.at} and runs.outputs.is_separated(self.taken - 1):
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
        tops = [place for place in sorted(self.come) if not self.flows[place].uses]
        self.begin(kind, [self.come.pop(place) for place in tops])
        self.kind = self.executable.kind

    def _expected(self, strides: Mapping[int, Tangent]) -> tuple[BackwardKey, BackwardKind]:
        """Return the key and the expected kind of the backward that these gradients start."""
        tops = {place for place, flow in enumerate(self.flows) if not flow.uses}
        called = None  # hidden states that this backward reaches; None: all
        if not tops <= strides.keys():
            nodes = {place: node() for place, node in self.nodes.items()}
            called = frozenset(
                p for p, node in nodes.items() if node and self.flows[p].uses and is_to_run(node)
            )
        key = (ambient_autocast(), tuple(sorted(strides.items())), called)
        last = self.backwards.came.get(key)
        if last is None:
            return key, self._kind_for(strides, called)
        outside = {*(last.outside or ())}
        fits = (k for k in self._known_kinds() if k == replace(last, outside=k.outside))
        return key, next((kind for kind in fits if outside <= {*(kind.outside or ())}), last)

    def _known_kinds(self) -> list[BackwardKind]:
        """Return known kinds of split backwards, the one of this forward first.

        It is preferred also because its plan may have headroom for more gradients.
        """
        kinds = (self.executable.kind, *self.backwards.variants)
        return [kind for kind in kinds if kind.is_split]

    def _kind_for(
        self, strides: Mapping[int, Tangent], called: frozenset[int] | None
    ) -> BackwardKind:
        """Return a kind of backward that these gradients may start, preferably a known one."""
        flows, autocast = self.flows, ambient_autocast()
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
            tangents[place] = self.executable.outputs.usual_tangent(place)
            outside.add(place)
        found = tuple(tangents[place] for place in range(len(flows)))
        return BackwardKind(found, autocast, tuple(sorted(outside)))

    def _compare(self) -> None:
        """Compare arrived gradients with those for which the program was made."""
        for place, grad in list(self.come.items()):
            strides = plain_strides(grad.shape, grad.stride())
            if place == self.at and grad.untyped_storage()._cdata not in self.given[place]:
                self.noisy.add(place)
            self.seen[place] = strides
            if strides == self.executable.kind.tangents[place]:
                continue
            if place != self.at or not self.runs.outputs.is_separated(self.taken - 1):
                self._refuse()
            self._begin_at(place, strides)

    def _begin_at(self, place: int, strides: Tangent) -> None:
        """Continue with a backward from a hidden state whose gradient has other strides."""
        kind = self._kind_for({place: strides}, frozenset())
        self.program, self.at = None, None
        assert self.variant is not None
        self.run_again_as(kind, self.backwards.for_backward(kind, self.variant))
        self.run_backward_of(self.executable, [])

    def _refuse(self) -> NoReturn:
        self._learn()
        raise arrived_otherwise("what was computed on the way does not serve for them")

    def _learn(self) -> None:
        """Expect the same kind of backward next time."""
        pairs = enumerate(self.kind.tangents)
        tangents = tuple(self.seen.get(place, tangent) for place, tangent in pairs)
        outside = tuple(sorted({*(self.kind.outside or ()), *self.noisy}))
        self.backwards.came[self.key] = BackwardKind(tangents, self.kind.autocast, outside)

    # ------------------------------------------------------------------ the program

    def run_backward_of(self, executable: Executable, given: list[Tensor]) -> None:
        """Begin the backward of an executable whose saved tensors are all present."""
        self.taken, self.at, self.sent = 0, None, None
        super().run_backward_of(executable, given)

    def let_go(self) -> None:
        """Drop nothing, because gradients of hidden states may still arrive in another way."""

    def run(self, give: int) -> tuple[Tensor | None, ...]:
        """Run the program to its next hand-over; return what that gives."""
        if self.at is not None:
            self.sent = [self.come.pop(self.at)]
            self.at = None
        found = super().run(give)
        self.sent = None
        self.taken = give + 1
        place = self.runs.outputs.given[give]
        if place is not None:
            self.at = self.runs.outputs.received[give]
            storages = {part.untyped_storage()._cdata for part in found if part is not None}
            self.given.setdefault(place, set()).update(storages)
            self.parts.setdefault(place, []).extend(found)
            return ()
        return found

    def may_take(self) -> bool:
        """Return whether the program can continue: it may be waiting for a gradient."""
        return self.at is None or self.at in self.come

    def found_at(self, place: int) -> tuple[Tensor | None, ...]:
        """Return the program's gradients for a place of the rail."""
        while place not in self.early and not self.is_over:
            if not self.may_take():
                assert self.at is not None
                self.seen[self.at] = None  # no gradient has arrived
                self._refuse()
            self.take()
        return self.early.pop(place, ())

    def take(self) -> None:
        give = self.taken
        found = self.run(give)
        if self.runs.outputs.given[give] is not None:
            return
        place = self.runs.outputs.rail_place(give)
        if self.watch is not None:
            self.watch.look(place, found)
        if before := self.early.get(place):  # of a program that was abandoned
            found = tuple([b if b is not None else f for b, f in zip(before, found, strict=True)])
        self.early[place] = found

    def give_all(self) -> None:
        """Store nothing in advance: later gradients depend on those of hidden states."""

    def finish(self) -> None:
        """Store the kind of this backward, and end."""
        self._learn()
        super().finish()
        if self.kept is None:
            super().let_go()


BackwardKey = tuple[Region | None, tuple[tuple[int, Tangent], ...], frozenset[int] | None]


def _reached(flows: Sequence[Flow], starts: Iterable[int]) -> set[int]:
    """Return the outputs from which the starting outputs of a backward were computed."""
    found: set[int] = set()
    waiting = list(starts)
    while waiting:
        new = {*flows[waiting.pop()].reaches} - found
        found |= new
        waiting += new
    return found


class _Knot(torch.autograd.Function):
    """A node before a hidden state: its backward returns parts of that state's gradient."""

    @staticmethod
    def forward(ctx: Any, step: SplitStep, place: int, is_last: bool, *edges: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.step, ctx.place, ctx.is_last, ctx.edges = step, place, is_last, len(edges)
        return torch.empty(0, device=edges[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Any, ...]:
        parts = ctx.step.reach(ctx.place, ctx.edges, is_last=ctx.is_last)
        return (None, None, None, *parts, *(None,) * (ctx.edges - len(parts)))
