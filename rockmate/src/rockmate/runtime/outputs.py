"""The outputs of a step: whose memory its backward reads, and how they are connected to others.

One Function serves all outputs of most steps. Outputs that use each other (hidden states) have a
Function each: their order, and their edges to one another and to the rail, are found here.

A plan for losses only assumes that logits and hidden states are dropped before the backward, as in
`model(**batch).loss.backward()`. If the caller holds them, their bytes exceed the budget.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rkgb.elements import target_of
from rkgb.graphs import BasicGraph, Flow, SimplifiedGraph, Tangent
from rkgb.run import Begin, Give, StepProgram, made_by, read_by


@dataclass(frozen=True, slots=True)
class Tie:
    """How an output is connected to the rail and to other outputs, if outputs use each other."""

    place: int  # among the roots
    output: int  # position among the outputs
    reaches: tuple[int, ...]  # the roots that it was computed from
    after: int  # number of places of the rail before its own gradient
    # For each time at which parts of its gradient are given: places before, largest number of
    # parts.
    knots: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Outputs:
    """The outputs of a program; positions are among them, places among the recorded roots."""

    graph: SimplifiedGraph
    program: StepProgram

    @property
    def _basic(self) -> BasicGraph:
        return self.graph.basic

    @cached_property
    def saved(self) -> tuple[tuple[int, str], ...]:
        """Outputs that the backward reads: (position in `saved`, name)."""
        outputs = set(self.program.outputs)
        return tuple((i, name) for i, name in enumerate(self.program.saved) if name in outputs)

    @cached_property
    def aliased(self) -> tuple[int, ...]:
        """Positions of outputs that the backward does not read but whose memory it reads."""
        infos = self._basic.infos
        saved = self.program.saved
        roots = {infos[name].alias_of for name in saved if name in infos}
        return tuple(
            place
            for place, name in enumerate(self.program.outputs)
            if name not in saved and name in infos and infos[name].alias_of in roots
        )

    @cached_property
    def shared(self) -> tuple[tuple[int, ...], ...]:
        """Positions of outputs that share memory, one tuple for each storage with several."""
        infos = self._basic.infos
        found: dict[str, list[int]] = {}
        for place, name in enumerate(self.program.outputs):
            if name in infos:
                found.setdefault(infos[name].alias_of, []).append(place)
        return tuple(tuple(places) for places in found.values() if len(places) > 1)

    @cached_property
    def leaving(self) -> tuple[int, ...]:
        """Positions of outputs assumed to be dropped before the backward, one per storage."""
        infos, basic = self.graph.infos, self._basic
        saved = {infos[name].alias_of for name in self.program.saved if name in infos}
        left = (basic.leaving_roots & self.graph.producer.keys()) - saved
        outputs = enumerate(self.program.outputs)
        places = {infos[name].alias_of: place for place, name in outputs if name in infos}
        return tuple(place for root, place in places.items() if root in left)

    @cached_property
    def plain(self) -> tuple[int, ...]:
        """Positions of outputs that get no gradient."""
        roots, outputs = self._basic.roots, self.program.outputs
        return tuple(place for place, name in enumerate(outputs) if name not in roots)

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """Positions of outputs whose gradients parts that run whole put together inside.

        An output comes after those that it was computed from.
        """
        ops = self._basic.ops
        wholes = ((op, target_of(op).whole) for op in ops)
        found = [op.results[at] for op, whole in wholes if whole is not None for at in whole.inner]
        places = {name: place for place, name in enumerate(self.program.outputs)}
        return tuple(places[name] for name in dict.fromkeys(found) if name in places)

    @cached_property
    def inner_roots(self) -> tuple[int, ...]:
        """The places of such outputs among the roots."""
        roots, outputs = self._basic.roots, self.program.outputs
        return tuple(roots.index(outputs[at]) for at in self.inner if outputs[at] in roots)

    def inner_before(self, output: int) -> tuple[int, ...]:
        """Return the positions of such outputs from which an output may have been computed.

        It is connected to them without passing a gradient, so that a backward which is asked for
        theirs passes through its Function.
        """
        return self._inner_before[output] if self.inner else ()

    @cached_property
    def _inner_before(self) -> Mapping[int, tuple[int, ...]]:
        order = self._made_in_order
        inner = self.inner
        return {at: tuple(i for i in inner if order[i] < order[at]) for at in order}

    @cached_property
    def _made_in_order(self) -> Mapping[int, int]:
        """For each position among the outputs, its turn: after those that it was computed from."""
        ops = self._basic.ops
        made = {name: turn for turn, op in enumerate(ops) for name in op.results}
        inner, outputs = self.inner, self.program.outputs
        last = len(inner)

        def turn(at: int) -> tuple[int, int]:
            return made.get(outputs[at], -1), inner.index(at) if at in inner else last

        return {at: place for place, at in enumerate(sorted(range(len(outputs)), key=turn))}

    @property
    def flows(self) -> tuple[Flow, ...]:
        """The outputs from which each output was computed."""
        return self._basic.flows

    @cached_property
    def given(self) -> tuple[int | None, ...]:
        """For each hand-over, the root that gets parts, or None if leaves get them."""
        roots = self._basic.roots
        return tuple(
            roots.index(give.output) if give.output else None for give in self.program.gives
        )

    @cached_property
    def received(self) -> tuple[int | None, ...]:
        """For each hand-over, the root whose gradient it receives, if any."""
        pairs = zip(self.program.gives, self.given, strict=True)
        return tuple(place if give.receives else None for give, place in pairs)

    def rail_place(self, give: int) -> int:
        """Return the number of places of a rail before a hand-over."""
        return self.given[:give].count(None)

    @cached_property
    def joints(self) -> tuple[tuple[int, int, tuple[int, ...], bool], ...]:
        """(position, position among outputs, used outputs, whether others use it) of each root.

        Used outputs are repeated once for each use. A root comes after the roots that it uses.
        """
        basic, outputs = self._basic, self.program.outputs
        at = [outputs.index(root) for root in basic.roots]
        found = []
        ties = self.ties
        if self.inner:
            ties = tuple(sorted(ties, key=lambda tie: self._made_in_order[tie.output]))
        for tie in ties:
            used = [at[to] for to in tie.reaches for _ in range(self.flows[to].uses)]
            found.append((tie.place, tie.output, tuple(used), self.flows[tie.place].uses > 0))
        return tuple(found)

    @cached_property
    def below(self) -> tuple[tuple[int, ...], ...]:
        """For each root, all roots that it was computed from, directly or not."""
        found: dict[int, frozenset[int]] = {}
        for tie in self.ties:
            found[tie.place] = frozenset(tie.reaches).union(*(found[to] for to in tie.reaches))
        return tuple(tuple(sorted(found[place])) for place in range(len(self.flows)))

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """The ties of all outputs, each after those that it was computed from."""
        basic, outputs = self._basic, self.program.outputs
        order: dict[int, None] = {}

        def add(place: int) -> None:
            for other in self.flows[place].reaches:
                if other not in order:
                    add(other)
            order[place] = None

        places = [*range(len(self.flows))]
        if self.inner:  # others have edges to these
            turns = self._made_in_order
            places.sort(key=lambda place: turns[outputs.index(basic.roots[place])])
        for place in sorted(places, key=lambda place: not self.flows[place].uses):
            if place not in order:
                add(place)
        found = []
        for place in order:
            flow = self.flows[place]
            gives = [give for give, to in enumerate(self.given) if to == place]
            knots = [(self.rail_place(g), len(self.program.gives[g].gradients)) for g in gives]
            # The last one takes all remaining parts: another backward may have other parts.
            last = (knots[-1][0] if knots else 0, flow.uses)
            after = self.rail_place(gives[-1]) if gives else 0
            is_tied = flow.uses > 0
            at = outputs.index(basic.roots[place])
            found.append(
                Tie(place, at, flow.reaches, after, (*knots[:-1], last) if is_tied else ())
            )
        return tuple(found)

    def is_separated(self, give: int) -> bool:
        """Return whether later gradients depend only on the one that a hand-over receives."""
        return self._separated[give]

    @cached_property
    def _separated(self) -> tuple[bool, ...]:
        found: list[bool] = []
        gradients = set(self.program.tangents)
        lines = self.program.backward
        again = False
        for place, line in enumerate(lines):
            if isinstance(line, Begin):
                again = line.again
            elif isinstance(line, Give):
                later = (name for other in lines[place + 1 :] for name in read_by(other))
                found.append(gradients.isdisjoint(later))
            gradients.update(() if again else made_by(line))
        return tuple(found)

    def usual_tangent(self, place: int) -> Tangent:
        """Return the strides of a root's gradient if an elementwise operation computes it."""
        info = self.graph.infos[self._basic.roots[place]]
        like = torch.empty_strided(info.shape, info.stride, device="meta")
        return plain_strides(info.shape, torch.empty_like(like).stride())


def plain_strides(shape: Sequence[int], strides: Sequence[int] | None) -> Tangent:
    """Return strides in a normal form: those of dimensions of size 1 have no meaning."""
    if strides is None:
        return None
    return tuple(0 if size <= 1 else stride for size, stride in zip(shape, strides, strict=True))


def tell_of_other_layouts(outputs: Iterable[Tensor], name: str, budget_bytes: int) -> None:
    """Have a step of plain PyTorch's warn when gradients come in another layout than is usual.

    What its backward takes was measured for the usual one: as an elementwise operation computes it,
    or the expanded one of a sum.
    """

    def look(grads: Sequence[Tensor | None], number: int, usual: Tangent) -> None:
        grad = grads[number]
        found = None if grad is None else plain_strides(grad.shape, grad.stride())
        if found and any(found) and found != usual:
            warnings.warn(
                f"the gradients of {name}, which runs whole, have arrived in another layout than "
                f"it was planned for (strides {found}); its backward may take more than the budget "
                f"of {budget_bytes} bytes. Hand back gradients as they were planned for "
                "(contiguous ones, mostly), or set bytes aside with reserve=.",
                RuntimeWarning,
                stacklevel=2,
            )

    for output in outputs:
        if output.dim() and output.grad_fn is not None and output.layout is torch.strided:
            usual = plain_strides(output.shape, torch.empty_like(output, device="meta").stride())
            seen = partial(look, number=output.output_nr, usual=usual)
            output.grad_fn.register_prehook(seen)


class OutputsHeld:
    """Watches the outputs of a step by weak references."""

    def __init__(self, outputs: Mapping[str, Tensor]) -> None:
        found = [(name, tensor.untyped_storage()) for name, tensor in outputs.items()]
        self._rows = [(name, StorageWeakRef(s), s.nbytes()) for name, s in found]

    def warn_above(self, room_bytes: int, model_name: str) -> bool:
        """Warn, and return True, if the held outputs exceed the headroom."""
        held = [(name, size) for name, storage, size in self._rows if not storage.expired()]
        held_bytes = sum(size for _, size in held)
        if held_bytes <= room_bytes:
            return False
        names = ", ".join(f"'{name}'" for name, _ in held)
        warnings.warn(
            f"outputs of {model_name} beside its loss ({names}, {held_bytes} bytes) are held while "
            f"its backward runs, which takes {held_bytes - room_bytes} bytes more than the budget. "
            "Let go of them before the backward: `loss = model(...).loss`, or `del outputs`; or "
            "raise the budget.",
            RuntimeWarning,
            stacklevel=2,
        )
        return True
