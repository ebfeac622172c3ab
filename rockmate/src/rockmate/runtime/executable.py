"""A compiled step, with the facts that are needed to run it under autograd."""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rkgb.elements import BATCH_NORMS, CAST, Numbers, target_of
from rkgb.engine import device_of
from rkgb.graphs import BackwardKind, Flow, SimplifiedGraph, Tangent
from rkgb.module_state import KeptWrites
from rkgb.run import Begin, CompiledStep, Give, Places, StepProgram, made_by, read_by, rerun_state
from rkgb.torch_api import current_dispatch_modes, dispatch_mode_stack
from rockmate.runtime.gradients.rails import Rail, RailPlaces, reader
from rockmate.runtime.gradients.shared_uses import Arrivals, FirstsWatch, RunningSums, SharedUses

_SPARE_RAILS = 4  # for steps that are between forward and backward at the same time
_hooks_before = operator.attrgetter("_backward_hooks")
_hooks_after = operator.attrgetter("_post_accumulate_grad_hooks")


def _is_in_turn(leaf: Tensor) -> bool:
    """Whether a leaf has hooks after its gradient that are no observers of ours."""
    hooks = (_hooks_after(leaf) or {}).values()
    return not all(getattr(hook, "only_watches", False) for hook in hooks)


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
class Executable:
    """A compiled step for one kind of backward."""

    graph: SimplifiedGraph
    compiled: CompiledStep
    # The places of hand-overs, for every kind of backward. `singles` have one part each, as hooks
    # on leaves need them.
    places: Places
    singles: Places
    lower: Callable[[Places], StepProgram]  # the same steps with other hand-overs
    is_apart: bool = False  # made by another plan: its forward saves other values
    beyond: str = ""  # why it takes more than the budget, in words
    # If it is apart: with the saved tensors as they are, for a step whose forward cannot run again.
    instead: Callable[[], Executable] | None = None
    arrivals: Arrivals = field(default_factory=Arrivals)
    _rails: list[Rail] = field(default_factory=list)
    _waiting: dict[SharedUses, Executable] = field(default_factory=dict)
    _moved: dict[int, Executable] = field(default_factory=dict)  # by the identity of its places

    @property
    def program(self) -> StepProgram:
        """The program that runs."""
        return self.compiled.program

    @cached_property
    def numbers(self) -> Numbers | None:
        """The unspecialised numbers of the program, if it has any."""
        return self.graph.dataflow.basic.numbers

    def taken(self, leaves: Sequence[Any]) -> tuple[tuple[float, ...], ...]:
        """Return the numbers that the program takes for a call with these leaves."""
        if self.numbers is None:
            return ()
        found = self.numbers.of(leaves)
        assert found is not None, "other plans are looked up for what goes another way"
        return (found,)

    @cached_property
    def runs_python(self) -> bool:
        """Whether it has opaque calls, which run the user's Python."""
        return bool(self.graph.dataflow.basic.whole_calls)

    @cached_property
    def cast_leaves(self) -> tuple[str, ...]:
        """The weights that autocast would cast once per region."""
        basic = self.graph.dataflow.basic
        leaves = {leaf for leaf, _ in basic.edges}
        found = {op.inputs[0] for op in basic.ops if op.target is CAST and op.inputs}
        inside = {name for whole in basic.whole_calls for name in whole.casts}
        return tuple(
            leaf for leaf in sorted(leaves) if leaf in found or basic.parameters.get(leaf) in inside
        )

    @cached_property
    def casts_once(self) -> frozenset[str]:
        """The weights among these whose cast gets a single gradient in this step.

        If a step summed several itself, rounding would differ from autograd's sum over all steps.
        """
        given = Counter(leaf for slots in self.casts_given for _, leaf, _ in slots)
        return frozenset(leaf for leaf, count in given.items() if count == 1)

    @cached_property
    def casts_given(self) -> tuple[tuple[tuple[int, str, torch.dtype], ...], ...]:
        """For each hand-over, the slots with gradients of casts, the weights and the types."""
        basic = self.graph.dataflow.basic
        casts = {op.results[0]: op for op in basic.ops if op.target is CAST}
        uses = Counter(name for op in basic.ops for name in op.inputs if name in casts)
        once = {(op.inputs[0], op.sequence_nr) for n, op in casts.items() if uses[n] == 1}
        made = {op.results[0]: op for op in basic.backward if op.target is CAST}
        return tuple(
            tuple(
                (slot, leaf, basic.infos[made[value].inputs[0]].dtype)
                for slot, (leaf, value) in enumerate(give.gradients)
                if value in made and (leaf, made[value].sequence_nr) in once
            )
            for give in self.program.gives
        )

    @cached_property
    def given_leaves(self) -> frozenset[str]:
        """The leaves whose gradients the program computes."""
        gives = self.program.gives
        return frozenset(leaf for give in gives for leaf, value in give.gradients if value)

    def type_of(self, name: str) -> torch.dtype:
        """Return the type of a value."""
        return self.graph.dataflow.basic.infos[name].dtype

    @cached_property
    def kind(self) -> BackwardKind:
        """The strides of the roots' gradients, and the autocast region of the backward."""
        kind = self.graph.dataflow.basic.kind
        tangents = tuple(map(plain_strides, self._shapes, kind.tangents))
        return BackwardKind(tangents, kind.autocast, kind.outside)

    @cached_property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        basic = self.graph.dataflow.basic
        return tuple(basic.infos[name].shape for name in basic.roots)

    @cached_property
    def shared_uses(self) -> SharedUses:
        """The gradients that may be added to earlier ones of the same leaf."""
        return SharedUses.of(self.graph, self.program)

    @cached_property
    def summed(self) -> Executable:
        """The executable whose backward adds later gradients of a leaf to its first one.

        Its forward is the same.
        """
        return self._with(self.shared_uses.in_sums(self.program))

    @cached_property
    def single(self) -> Executable:
        """The executable that hands each part over separately, as eager does.

        Its forward is the same.
        """
        return replace(self._with(self.lower(self.singles)), places=self.singles)

    def _with(self, program: StepProgram) -> Executable:
        return replace(
            self, compiled=self.compiled.other(program), _rails=[], _waiting={}, _moved={}
        )

    def on_rail_of(self, laid: Executable, form: Executable) -> Executable:
        """Return the executable whose backward uses a rail that was laid for another one."""
        if self.kind.is_split != laid.kind.is_split:
            return self._at_places_of(laid)._on_rail_of(laid, form)
        return self._on_rail_of(laid, form)

    def _at_places_of(self, laid: Executable) -> Executable:
        key = id(laid.places)
        if key not in self._moved:
            moved = self._with(self.lower(laid.places))
            self._moved[key] = replace(moved, places=laid.places, singles=laid.singles)
        return self._moved[key]

    def _on_rail_of(self, laid: Executable, form: Executable) -> Executable:
        if form.program.has_sums:
            uses = laid.shared_uses
            if uses.serves(self.shared_uses) and not self.runs_python:
                return self.summed
            if uses not in self._waiting:
                self._waiting[uses] = self._with(uses.waiting(self.program))
            return self._waiting[uses]
        return self if form.places is laid.places else self.single

    @property
    def backs(self) -> Executable:
        """The executable whose backward follows the next forward: this one, or the one in sums."""
        return self.summed if self.arrivals.expect_none and self._has_many_sums else self

    @cached_property
    def _has_many_sums(self) -> bool:
        # An opaque call may give no gradient although one is to be added.
        return self.shared_uses.are_many and not self.runs_python

    @cached_property
    def layout(self) -> RailPlaces:
        """The layout of rails: a place for each hand-over."""
        edges = self.graph.dataflow.basic.edges
        leaves = [tuple(edges[edge][0] for edge in place) for place in self.places]
        if self.program.has_sums:
            leaves = [give.leaves for give in self.program.gives if not give.output]
        return RailPlaces(tuple(leaves), self.program.has_sums)

    def sums(self) -> tuple[RunningSums, ...]:
        """Return the sums that a program with sums takes as arguments."""
        return (RunningSums(self.arrivals, _sees_all()),) if self.program.has_sums else ()

    def watch(self) -> FirstsWatch | None:
        """Return the watch that finds out whether sums are possible; None if that is known."""
        known = self.program.has_sums or self.arrivals.noisy or self.arrivals.expect_none
        if known or not self._has_many_sums or not _sees_all():
            return None
        return FirstsWatch(self.shared_uses, self.arrivals)

    @cached_property
    def lasting(self) -> bool:
        """Whether all leaves are parameters, which are the same in every step."""
        inputs = set(self.graph.dataflow.basic.inputs)
        return inputs.isdisjoint(leaf for leaf, _ in self.graph.dataflow.basic.edges)

    @cached_property
    def _roots(self) -> Mapping[str, str]:
        """For every value of the program, the maker of its memory."""
        infos = self.graph.dataflow.infos
        roots = {name: info.alias_of for name, info in infos.items()}
        for op in self.program.calls:
            if op.target is torch.ops.aten.as_strided.default:  # the program adds such views
                roots.setdefault(op.results[0], roots.get(op.inputs[0], ""))
        return roots

    @cached_property
    def held(self) -> tuple[str, ...]:
        """Externals whose memory the backward reads, so that they must not change meanwhile."""
        roots = self._roots
        read = {roots.get(name, name) for name in self.program.saved}
        return tuple(name for name in self.program.externals if roots[name] in read)

    def told(self, name: str) -> str:
        """Return the user's name of an external: the path of a parameter or buffer."""
        basic = self.graph.dataflow.basic
        return basic.parameters.get(name) or basic.buffers.get(name) or name

    @cached_property
    def reads_again(self) -> tuple[str, ...]:
        """Externals from which the backward recomputes, without those that the forward writes."""
        roots = self._roots
        read = {roots.get(name, name) for name in self.program.read_again}
        return tuple(n for n in self.held if roots[n] in read and n not in self.written)

    @cached_property
    def others_again(self) -> tuple[str, ...]:
        """Those of them that are no parameters."""
        parameters = self.graph.dataflow.basic.parameters
        return tuple(name for name in self.reads_again if name not in parameters)

    @cached_property
    def holds_written(self) -> bool:
        """Whether the forward writes to memory that the backward reads."""
        return not self.written.isdisjoint(self.held)

    @cached_property
    def written(self) -> frozenset[str]:
        """Externals to which the forward writes: buffers."""
        roots, written = self._roots, self.graph.written_roots
        return frozenset(name for name in self.program.externals if roots[name] in written)

    @cached_property
    def written_places(self) -> tuple[int, ...]:
        """Places of `written` among the externals of the program."""
        return tuple(i for i, n in enumerate(self.program.externals) if n in self.written)

    @cached_property
    def seen_writes(self) -> tuple[str, ...]:
        """Of these, those whose versions plain PyTorch raises too: no statistics of BatchNorms."""
        infos, ops = self.graph.dataflow.infos, self.graph.dataflow.basic.ops
        names = {n for op in ops if op.target_name not in BATCH_NORMS for n in op.writes}
        roots = {infos[name].alias_of for name in names}
        return tuple(name for name in self.program.externals if self._roots[name] in roots)

    @cached_property
    def unrepeatable(self) -> str:
        """A buffer that the forward changes and on which its results depend, or ''."""
        return next((n for k in self.graph.nodes for n in rerun_state(self.graph, k)), "")

    @property
    def can_repeat(self) -> bool:
        """Whether a second run of the forward has the same results."""
        return not (self.runs_python or self.unrepeatable)

    def missing_for(self, other: Executable) -> list[str]:
        """Return the values that another backward reads and this forward does not save."""
        kept = {*self.program.saved, *self.graph.dataflow.basic.externals}
        return [name for name in other.program.saved if name not in kept]

    @cached_property
    def is_random(self) -> bool:
        """Whether the forward draws random numbers."""
        return any(node.is_random for node in self.graph.nodes)

    @cached_property
    def inner_outputs(self) -> tuple[int, ...]:
        """Positions of outputs whose gradients parts that run whole put together inside.

        An output comes after those that it was computed from.
        """
        ops = self.graph.dataflow.basic.ops
        wholes = ((op, target_of(op).whole) for op in ops)
        found = [op.results[at] for op, whole in wholes if whole is not None for at in whole.inner]
        places = {name: place for place, name in enumerate(self.program.outputs)}
        return tuple(places[name] for name in dict.fromkeys(found) if name in places)

    @cached_property
    def inner_roots(self) -> tuple[int, ...]:
        """The places of such outputs among the roots."""
        roots, outputs = self.graph.dataflow.basic.roots, self.program.outputs
        return tuple(roots.index(outputs[at]) for at in self.inner_outputs if outputs[at] in roots)

    def inner_before(self, output: int) -> tuple[int, ...]:
        """Return the positions of such outputs from which an output may have been computed.

        It is connected to them without passing a gradient, so that a backward which is asked for
        theirs passes through its Function.
        """
        return self._inner_before[output] if self.inner_outputs else ()

    @cached_property
    def _inner_before(self) -> Mapping[int, tuple[int, ...]]:
        order = self._made_in_order
        inner = self.inner_outputs
        return {at: tuple(i for i in inner if order[i] < order[at]) for at in order}

    @cached_property
    def _made_in_order(self) -> Mapping[int, int]:
        """For each position among the outputs, its turn: after those that it was computed from."""
        ops = self.graph.dataflow.basic.ops
        made = {name: turn for turn, op in enumerate(ops) for name in op.results}
        inner, outputs = self.inner_outputs, self.program.outputs
        last = len(inner)

        def turn(at: int) -> tuple[int, int]:
            return made.get(outputs[at], -1), inner.index(at) if at in inner else last

        return {at: place for place, at in enumerate(sorted(range(len(outputs)), key=turn))}

    @cached_property
    def keeps_by_backward(self) -> bool:
        """Whether the saved tensors depend on the backward with which it was compiled."""
        ops = (op for node in self.graph.nodes for op in node.ops)
        return any(target_of(op).is_half for op in ops)

    @cached_property
    def saved_outputs(self) -> tuple[tuple[int, str], ...]:
        """Outputs that the backward reads: (position in `saved`, name)."""
        outputs = set(self.program.outputs)
        return tuple((i, name) for i, name in enumerate(self.program.saved) if name in outputs)

    @cached_property
    def aliased_outputs(self) -> tuple[int, ...]:
        """Positions of outputs that the backward does not read but whose memory it reads."""
        infos = self.graph.dataflow.basic.infos
        saved = self.program.saved
        roots = {infos[name].alias_of for name in saved if name in infos}
        return tuple(
            place
            for place, name in enumerate(self.program.outputs)
            if name not in saved and name in infos and infos[name].alias_of in roots
        )

    @cached_property
    def shared_outputs(self) -> tuple[tuple[int, ...], ...]:
        """Positions of outputs that share memory, one tuple for each storage with several."""
        infos = self.graph.dataflow.basic.infos
        found: dict[str, list[int]] = {}
        for place, name in enumerate(self.program.outputs):
            if name in infos:
                found.setdefault(infos[name].alias_of, []).append(place)
        return tuple(tuple(places) for places in found.values() if len(places) > 1)

    @cached_property
    def leaving_outputs(self) -> tuple[int, ...]:
        """Positions of outputs assumed to be dropped before the backward, one per storage."""
        infos, basic = self.graph.dataflow.infos, self.graph.dataflow.basic
        saved = {infos[name].alias_of for name in self.program.saved if name in infos}
        left = (basic.leaving_roots & self.graph.producer.keys()) - saved
        outputs = enumerate(self.program.outputs)
        places = {infos[name].alias_of: place for place, name in outputs if name in infos}
        return tuple(place for root, place in places.items() if root in left)

    @cached_property
    def plain_outputs(self) -> tuple[int, ...]:
        """Positions of outputs that get no gradient."""
        roots, outputs = self.graph.dataflow.basic.roots, self.program.outputs
        return tuple(place for place, name in enumerate(outputs) if name not in roots)

    # ------------------------------------------------------------------ hidden states

    @property
    def flows(self) -> tuple[Flow, ...]:
        """The outputs from which each output was computed."""
        return self.graph.dataflow.basic.flows

    @cached_property
    def outputs_given(self) -> tuple[int | None, ...]:
        """For each hand-over, the root that gets parts, or None if leaves get them."""
        roots = self.graph.dataflow.basic.roots
        return tuple(
            roots.index(give.output) if give.output else None for give in self.program.gives
        )

    @cached_property
    def received(self) -> tuple[int | None, ...]:
        """For each hand-over, the root whose gradient it receives, if any."""
        pairs = zip(self.program.gives, self.outputs_given, strict=True)
        return tuple(place if give.receives else None for give, place in pairs)

    def rail_place(self, give: int) -> int:
        """Return the number of places of a rail before a hand-over."""
        return self.outputs_given[:give].count(None)

    @cached_property
    def joints(self) -> tuple[tuple[int, int, tuple[int, ...], bool], ...]:
        """(position, position among outputs, used outputs, whether others use it) of each root.

        Used outputs are repeated once for each use. A root comes after the roots that it uses.
        """
        basic, outputs = self.graph.dataflow.basic, self.program.outputs
        at = [outputs.index(root) for root in basic.roots]
        found = []
        ties = self.ties
        if self.inner_outputs:
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
        basic, outputs = self.graph.dataflow.basic, self.program.outputs
        order: dict[int, None] = {}

        def add(place: int) -> None:
            for other in self.flows[place].reaches:
                if other not in order:
                    add(other)
            order[place] = None

        places = [*range(len(self.flows))]
        if self.inner_outputs:  # others have edges to these
            turns = self._made_in_order
            places.sort(key=lambda place: turns[outputs.index(basic.roots[place])])
        for place in sorted(places, key=lambda place: not self.flows[place].uses):
            if place not in order:
                add(place)
        found = []
        for place in order:
            flow = self.flows[place]
            gives = [give for give, to in enumerate(self.outputs_given) if to == place]
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
        info = self.graph.dataflow.infos[self.graph.dataflow.basic.roots[place]]
        like = torch.empty_strided(info.shape, info.stride, device="meta")
        return plain_strides(info.shape, torch.empty_like(like).stride())

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """For each hand-over, the indices in `held` of values that are read before it."""
        roots = self._roots
        places: dict[str, list[int]] = {}
        for place, name in enumerate(self.held):
            places.setdefault(roots[name], []).append(place)
        found: list[tuple[int, ...]] = []
        current: dict[int, None] = {}
        for names, ends in self.program.reads_of_backward():
            for name in names:
                current.update(dict.fromkeys(places.get(roots.get(name, name), ())))
            if ends:
                found.append(tuple(current))
                current = {}
        return tuple(found)

    @cached_property
    def read_externals(self) -> Callable[[Mapping[str, Tensor]], Sequence[Tensor]]:
        """Picks from the external values what the forward takes."""
        return reader(self.program.externals)

    @cached_property
    def read_held(self) -> Callable[[Mapping[str, Tensor]], Sequence[Tensor]]:
        """Picks `held` from the external values."""
        return reader(self.held)

    @cached_property
    def read_seen_writes(self) -> Callable[[Mapping[str, Tensor]], Sequence[Tensor]]:
        """Picks `seen_writes` from the external values."""
        return reader(self.seen_writes)

    @cached_property
    def pick_held(self) -> Callable[[Sequence[int]], Sequence[int]]:
        """Picks the entries of `held` from a sequence with one entry per external."""
        places = {name: place for place, name in enumerate(self.program.externals)}
        return reader([places[name] for name in self.held])

    @cached_property
    def read_leaves(self) -> Callable[[Mapping[str, Tensor]], Sequence[Tensor]]:
        """Picks the leaves, each once, from the external values."""
        return reader(list(dict.fromkeys(leaf for leaf, _ in self.graph.dataflow.basic.edges)))

    def for_hooks(self, external: Mapping[str, Tensor]) -> Executable:
        """Return the executable whose rail calls hooks of leaves in eager's order."""
        return self.single if self._has_hooks(external) or self.arrivals.in_parts else self.backs

    def _has_hooks(self, external: Mapping[str, Tensor]) -> bool:
        leaves = self.read_leaves(external)
        after = any(map(_hooks_after, leaves)) and any(map(_is_in_turn, leaves))
        return after or any(map(_hooks_before, leaves))

    def warn_of_order(self, external: Mapping[str, Tensor]) -> None:
        """Warn if there are hooks on leaves that are not called in eager's order."""
        basic = self.graph.dataflow.basic
        reason = ""
        if not self._waits_for_order:
            reason = (
                "within the budget, gradients cannot wait for one another. It matters if the hooks "
                "draw random numbers or read one another's results; then raise the budget"
            )
        elif path := self._draws_inside:
            reason = (
                f"submodule '{path}' runs whole, its backward draws random numbers, and gradients "
                "of its parameters come after that. It matters if the hooks draw, too; then let "
                "one of the two use a torch.Generator of its own"
            )
        if reason and self._has_hooks(external):
            warnings.warn(
                f"hooks on parameters of {basic.model_name} are called in another order than in "
                f"plain PyTorch: {reason}.",
                RuntimeWarning,
                stacklevel=2,
            )

    @cached_property
    def _draws_inside(self) -> str:
        """The path of a submodule that runs whole and whose backward draws, or ""."""
        wholes = (target_of(op).whole for op in self.graph.dataflow.basic.ops)
        drawing = (whole.path or "(root)" for whole in wholes if whole is not None and whole.draws)
        return next(drawing, "")

    @cached_property
    def _waits_for_order(self) -> bool:
        return list(self.singles) == sorted(self.singles)

    def rail(self, external: Mapping[str, Tensor]) -> Rail:
        """Return a rail to the leaves among the external values that no other step is using."""
        layout, device = self.layout, self.graph.dataflow.basic.device
        leaves = layout.read_leaves(external)
        stream = device_of(device).current_stream()
        while self._rails:
            rail = self._rails.pop()
            if rail.layout is layout and rail.fits(leaves, stream):
                rail.renew()
                return rail
            # What adds up at the leaves keeps its stream, too, for as long as a rail leads there.
            del rail
        return Rail(layout, leaves, device, self.arrivals, stream)

    def give_back(self, rail: Rail) -> None:
        """Take back the rail of a step that has ended."""
        if self.lasting and not rail.has_hooks and len(self._rails) < _SPARE_RAILS:
            self._rails.append(rail)


def _sees_all() -> bool:
    """Return whether autograd is the only one that can keep a handed-over tensor alive.

    A mode that watches operations may also keep their results.
    """
    if not current_dispatch_modes():
        return True
    return all(isinstance(mode, KeptWrites) for mode in dispatch_mode_stack())


def plain_strides(shape: Sequence[int], strides: Sequence[int] | None) -> Tangent:
    """Return strides in a normal form: those of dimensions of size 1 have no meaning."""
    if strides is None:
        return None
    return tuple(0 if size <= 1 else stride for size, stride in zip(shape, strides, strict=True))
