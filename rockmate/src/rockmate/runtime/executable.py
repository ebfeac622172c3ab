"""A compiled step, with the facts that are needed to run it under autograd."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rkgb.elements import BATCH_NORMS, Numbers, target_of
from rkgb.engine import device_of
from rkgb.graphs import BackwardKind, BasicGraph, SimplifiedGraph
from rkgb.module_state import KeptWrites
from rkgb.run import CompiledStep, Places, StepProgram, rerun_state
from rkgb.torch_api import current_dispatch_modes, dispatch_mode_stack
from rockmate.runtime.gradients.casts import Casts
from rockmate.runtime.gradients.rails import Rail, RailPlaces, reader
from rockmate.runtime.gradients.shared_uses import (
    ArrivalOrder,
    FirstsWatch,
    RunningSums,
    SharedUses,
)
from rockmate.runtime.outputs import Outputs, plain_strides

_SPARE_RAILS = 4  # for steps that are between forward and backward at the same time
_hooks_before = operator.attrgetter("_backward_hooks")
_hooks_after = operator.attrgetter("_post_accumulate_grad_hooks")


def _is_in_turn(leaf: Tensor) -> bool:
    """Whether a leaf has hooks after its gradient that are no observers of ours."""
    hooks = (_hooks_after(leaf) or {}).values()
    return not all(getattr(hook, "only_watches", False) for hook in hooks)


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
    arrivals: ArrivalOrder = field(default_factory=ArrivalOrder)
    _rails: list[Rail] = field(default_factory=list)
    _waiting: dict[SharedUses, Executable] = field(default_factory=dict)
    _moved: dict[int, Executable] = field(default_factory=dict)  # by the identity of its places

    @property
    def basic(self) -> BasicGraph:
        """The recorded step."""
        return self.graph.basic

    @property
    def program(self) -> StepProgram:
        """The program that runs."""
        return self.compiled.program

    @cached_property
    def outputs(self) -> Outputs:
        """Its outputs, and how they are connected."""
        return Outputs(self.graph, self.program)

    @cached_property
    def casts(self) -> Casts:
        """The casts of weights that it makes."""
        return Casts(self.graph, self.program)

    @cached_property
    def numbers(self) -> Numbers | None:
        """The unspecialised numbers of the program, if it has any."""
        return self.basic.numbers

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
        return bool(self.basic.whole_calls)

    @cached_property
    def kind(self) -> BackwardKind:
        """The strides of the roots' gradients, and the autocast region of the backward."""
        kind = self.basic.kind
        tangents = tuple(map(plain_strides, self._shapes, kind.tangents))
        return BackwardKind(tangents, kind.autocast, kind.outside)

    @cached_property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        basic = self.basic
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
        edges = self.basic.edges
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
        inputs = set(self.basic.inputs)
        return inputs.isdisjoint(leaf for leaf, _ in self.basic.edges)

    @cached_property
    def _roots(self) -> Mapping[str, str]:
        """For every value of the program, the maker of its memory."""
        infos = self.graph.infos
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
        basic = self.basic
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
        parameters = self.basic.parameters
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
        infos, ops = self.graph.infos, self.basic.ops
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
        kept = {*self.program.saved, *self.basic.externals}
        return [name for name in other.program.saved if name not in kept]

    @cached_property
    def is_random(self) -> bool:
        """Whether the forward draws random numbers."""
        return any(node.is_random for node in self.graph.nodes)

    @cached_property
    def keeps_by_backward(self) -> bool:
        """Whether the saved tensors depend on the backward with which it was compiled."""
        ops = (op for node in self.graph.nodes for op in node.ops)
        return any(target_of(op).is_half for op in ops)

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
        return reader(list(dict.fromkeys(leaf for leaf, _ in self.basic.edges)))

    def for_hooks(self, external: Mapping[str, Tensor]) -> Executable:
        """Return the executable whose rail calls hooks of leaves in eager's order."""
        return self.single if self._has_hooks(external) or self.arrivals.in_parts else self.backs

    def _has_hooks(self, external: Mapping[str, Tensor]) -> bool:
        leaves = self.read_leaves(external)
        after = any(map(_hooks_after, leaves)) and any(map(_is_in_turn, leaves))
        return after or any(map(_hooks_before, leaves))

    def warn_of_order(self, external: Mapping[str, Tensor]) -> None:
        """Warn if there are hooks on leaves that are not called in eager's order."""
        basic = self.basic
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
        wholes = (target_of(op).whole for op in self.basic.ops)
        drawing = (whole.path or "(root)" for whole in wholes if whole is not None and whole.draws)
        return next(drawing, "")

    @cached_property
    def _waits_for_order(self) -> bool:
        return list(self.singles) == sorted(self.singles)

    def rail(self, external: Mapping[str, Tensor]) -> Rail:
        """Return a rail to the leaves among the external values that no other step is using."""
        layout, device = self.layout, self.basic.device
        leaves = layout.read_leaves(external)
        stream = device_of(device).current_stream()
        while self._rails:
            rail = self._rails.pop()
            if rail.layout is layout and rail.fits(leaves, stream):
                rail.renew()
                return rail
            # What adds up at the leaves keeps its stream, too, for as long as a rail leads there.
            del rail
        return Rail(layout, leaves, device, self.arrivals, stream, lasts=self.lasting)

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
