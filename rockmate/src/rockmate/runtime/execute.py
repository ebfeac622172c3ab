"""Run a compiled step under autograd: the user writes `loss.backward()` and nothing else.

The forward runs at once, below autograd. Its outputs hang on a rail of small Functions whose
backwards advance the backward program. Nothing is decided here but which program fits the
gradients that arrive: their number and how they lie in memory were recorded with the step, and
other ones get a recording of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rkgb.engine import (
    BackwardKind,
    CompiledStep,
    SimplifiedGraph,
    StepProgram,
    Tangent,
    ambient_autocast,
    straight_to_kernels,
)
from rockmate.errors import (
    BackwardTwiceError,
    ChangedTensorError,
    DoubleBackwardError,
    UnsupportedModuleError,
)
from rockmate.runtime.rails import Rail

_SPARE_RAILS = 4  # of steps that are between forward and backward at once


@dataclass(frozen=True)
class Executable:
    """A compiled step, made for gradients that lie in memory in one way."""

    graph: SimplifiedGraph
    compiled: CompiledStep
    leaves: tuple[str, ...]  # that any backward may give a gradient to
    _rails: list[Rail] = field(default_factory=list)

    @property
    def program(self) -> StepProgram:
        """What is run."""
        return self.compiled.program

    @cached_property
    def kind(self) -> BackwardKind:
        """How the gradients of the roots lie in memory, and the region of the backward."""
        kind = self.graph.dataflow.basic.kind
        return BackwardKind(tuple(map(plain_strides, self._shapes, kind.tangents)), kind.autocast)

    @cached_property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        basic = self.graph.dataflow.basic
        return tuple(basic.infos[name].shape for name in basic.roots)

    @cached_property
    def leaf_names(self) -> tuple[tuple[str, ...], ...]:
        """For each hand-over, whose gradients it gives."""
        return tuple(tuple(leaf for leaf, _ in give.gradients) for give in self.program.gives)

    @cached_property
    def laid(self) -> tuple[tuple[str, ...], ...]:
        """For each hand-over, the leaves that a rail leads to there.

        The last one leads to all leaves that this program gives nothing to: gradients may arrive
        otherwise than expected, and then they get one.
        """
        given = {leaf for part in self.leaf_names for leaf in part}
        rest = tuple(leaf for leaf in self.leaves if leaf not in given)
        return (*self.leaf_names[:-1], (*self.leaf_names[-1], *rest))

    @cached_property
    def lasting(self) -> bool:
        """Whether all leaves are parameters, which stay the same from step to step."""
        inputs = set(self.graph.dataflow.basic.inputs)
        return inputs.isdisjoint(self.leaves)

    @cached_property
    def saved_externals(self) -> tuple[tuple[int, str], ...]:
        """What the backward reads of externals that no operation writes: (place in saved, name)."""
        written = {name for node in self.graph.nodes for name in node.written_buffers}
        known = set(self.program.externals) - written
        return tuple((i, name) for i, name in enumerate(self.program.saved) if name in known)

    @cached_property
    def saved_outputs(self) -> tuple[tuple[int, str], ...]:
        """Outputs of the user that the backward reads: (place in saved, name)."""
        outputs = set(self.program.outputs)
        return tuple((i, name) for i, name in enumerate(self.program.saved) if name in outputs)

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """For each hand-over, which of `saved_externals` are read on the way to it."""
        places = {name: place for place, (_, name) in enumerate(self.saved_externals)}
        found: list[tuple[int, ...]] = []
        current: dict[int, None] = {}
        for names, ends in self.program.reads_of_backward():
            current.update(dict.fromkeys(places[n] for n in names if n in places))
            if ends:
                found.append(tuple(current))
                current = {}
        return tuple(found)

    def rail(self, leaves: Sequence[Sequence[Tensor]]) -> Rail:
        """Return a rail to `leaves` that no other step is using."""
        while self._rails:
            rail = self._rails.pop()
            if rail.fits(leaves):
                rail.renew()
                return rail
        return Rail(leaves, self.graph.dataflow.basic.device)

    def give_back(self, rail: Rail) -> None:
        """Take a rail back whose step has ended."""
        if self.lasting and len(self._rails) < _SPARE_RAILS:
            self._rails.append(rail)


# Makes the executable for other gradients, from what the step was called with.
Variant = Callable[[BackwardKind], Executable]


class Executor:
    """Runs forwards with the executable for the gradients that came last, or are expected."""

    def __init__(self, planned: Executable) -> None:
        self.planned = self.expected = planned
        self.variants = {planned.kind: planned}

    def __call__(self, external: Mapping[str, Tensor], variant: Variant) -> list[Tensor]:
        """Run the forward and return the outputs, connected to autograd.

        `variant` is called in the backward where gradients arrive that lie otherwise.
        """
        executable = self.expected
        step = _Step(self, executable, external, variant)
        values = [external[name] for name in executable.program.externals]
        with straight_to_kernels():
            outputs, step.saved = executable.compiled.forward(values)
        step.remember_versions()
        leaves = [[external[leaf] for leaf in part] for part in executable.laid]
        rail = step.rail = executable.rail(leaves)
        return list(_Outputs.apply(step, outputs, rail.token))  # type: ignore[no-untyped-call]

    def for_backward(self, kind: BackwardKind, variant: Variant) -> Executable:
        """Return the executable for such a backward, and expect it from now on."""
        if kind not in self.variants:
            self.variants[kind] = variant(kind)
        self.expected = self.variants[kind]
        return self.expected


class _Step:
    """One forward and its backward: what it has saved, and how far the backward has come."""

    def __init__(
        self,
        executor: Executor,
        executable: Executable,
        external: Mapping[str, Tensor],
        variant: Variant,
    ) -> None:
        self.executor, self.executable = executor, executable
        self.external: Mapping[str, Tensor] | None = external
        self.variant: Variant | None = variant
        self.saved: list[Any] = []
        self.rail: Rail | None = None
        self.started = False
        self.program: Iterator[list[Tensor]] | None = None
        self.held: list[Tensor] = []
        self.versions: list[int] = []
        self.storages: list[int] = []
        self.output_versions: list[int] = []
        self.bridged: dict[str, list[Tensor]] | None = None
        self.laid = executable.laid

    def __del__(self) -> None:
        if self.rail is not None and not self.started:  # a forward without a backward
            self.executable.give_back(self.rail)

    # ------------------------------------------------------------------ the user's own tensors

    def remember_versions(self) -> None:
        saved, executable = self.saved, self.executable
        held = self.held = [saved[place] for place, _ in executable.saved_externals]
        self.versions = [-1 if t.is_inference() else t._version for t in held]
        self.storages = [t.untyped_storage()._cdata for t in held]
        self.output_versions = [saved[place]._version for place, _ in executable.saved_outputs]

    def _check_storages(self) -> None:
        # Not addresses: FSDP frees and fills the memory of the same storage.
        for place, tensor in enumerate(self.held):
            if tensor.untyped_storage()._cdata != self.storages[place]:
                self._changed(self.executable.saved_externals[place][1])

    def _check_outputs(self) -> None:
        pairs = zip(self.executable.saved_outputs, self.output_versions, strict=True)
        for (place, name), version in pairs:
            if self.saved[place]._version != version:
                raise ChangedTensorError(
                    f"the output '{name}' of a Rockmate module was changed in place between "
                    "forward and backward, which reads it. Work on a copy: y = y.clone()."
                )

    def _changed(self, name: str) -> None:
        raise ChangedTensorError(
            f"'{name}' was changed in place between the forward and the backward of a "
            "Rockmate module, and the backward needs its old content. Change parameters "
            "and inputs after backward, or run the forward again."
        )

    # ------------------------------------------------------------------ backward

    def start(self, grads: Sequence[Tensor | None]) -> None:
        if self.started:
            raise BackwardTwiceError(
                "backward was called a second time on the same forward of a Rockmate module; its "
                "activations are gone after the first. Add the losses before calling backward, or "
                "run the forward again."
            )
        self.started = True
        self._check_outputs()
        self._check_storages()
        basic = self.executable.graph.dataflow.basic
        by_name = dict(zip(self.executable.program.outputs, grads, strict=True))
        arrived = [by_name[name] for name in basic.roots]
        strides = (None if g is None else plain_strides(g.shape, g.stride()) for g in arrived)
        kind = BackwardKind(tuple(strides), ambient_autocast())
        executable = self.executable
        if kind != executable.kind:
            assert self.variant is not None
            executable = self.executor.for_backward(kind, self.variant)
            self._change_to(executable)
        self.external = self.variant = None
        given = [grad for grad in arrived if grad is not None]
        self.program = executable.compiled.backward(self.saved, given)
        assert self.rail is not None
        self.rail.carry(self)

    def _change_to(self, executable: Executable) -> None:
        """Go on with the backward of another executable, from what this forward has saved."""
        names = self.executable.program.saved
        values = dict(zip(names, self.saved, strict=True))
        assert self.external is not None
        values.update({n: t for n, t in self.external.items() if n not in values})
        missing = [name for name in executable.program.saved if name not in values]
        if missing:
            raise UnsupportedModuleError(
                "gradients have arrived at outputs of a Rockmate module in another way than "
                f"before, and their backward needs '{missing[0]}', which this forward has not "
                "kept. Run the step again: it is planned for such gradients from now on."
            )
        self.saved[:] = [values[name] for name in executable.program.saved]
        self.bridged = {}
        held = dict(
            zip((n for _, n in self.executable.saved_externals), self.versions, strict=True)
        )
        self.executable = executable
        self.held = [self.saved[place] for place, _ in executable.saved_externals]
        self.versions = [
            held.get(name, tensor._version)
            for (_, name), tensor in zip(executable.saved_externals, self.held, strict=True)
        ]

    def _bridge(self, place: int) -> Sequence[Tensor | None]:
        """Run a program whose hand-overs are others than the rail's: all at once, then give."""
        assert self.bridged is not None
        if place == 0:
            assert self.program is not None
            with straight_to_kernels():
                for names, given in zip(self.executable.leaf_names, self.program, strict=True):
                    for name, gradient in zip(names, given, strict=True):
                        self.bridged.setdefault(name, []).append(gradient)
                    given.clear()
        waiting = (self.bridged.get(name) for name in self.laid[place])
        found = [queue.pop(0) if queue else None for queue in waiting]
        if place + 1 == len(self.laid):
            self._finish()
        return found

    def advance(self, place: int) -> Sequence[Tensor | None]:
        """Run the program to its next hand-over; return the gradients of number `place`."""
        if self.bridged is not None:
            return self._bridge(place)
        assert self.program is not None
        versions, held = self.versions, self.held
        for index in self.executable.reads[place]:
            if held[index]._version != versions[index] and versions[index] >= 0:
                self._changed(self.executable.saved_externals[index][1])
        with straight_to_kernels():
            given = next(self.program)
        found = [*given, *[None] * (len(self.laid[place]) - len(given))]
        given.clear()
        if place + 1 == len(self.executable.reads):
            self._finish()
        return found

    def _finish(self) -> None:
        self.program = None
        self.held = []
        if self.rail is not None and self.bridged is None:
            self.executable.give_back(self.rail)
        self.rail = None


class _Outputs(torch.autograd.Function):
    """Returns the outputs; its backward hands their gradients to the step."""

    @staticmethod
    def forward(ctx: Any, step: _Step, made: list[Tensor], token: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.step, ctx.token = step, token.detach()
        roots = step.executable.graph.dataflow.basic.roots
        # Fresh views of the tensors: autograd marks what is returned here, and a marked tensor
        # among what is saved would keep this very function, and so the step, alive for ever.
        outputs = [tensor.detach() for tensor in made]
        made.clear()
        names = zip(outputs, step.executable.program.outputs, strict=True)
        ctx.mark_non_differentiable(*(t for t, name in names if name not in roots))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # autograd enables it here for create_graph=True only
            raise DoubleBackwardError(
                "backward with create_graph=True was asked of a Rockmate module, whose gradients "
                "cannot be differentiated again. Use the original module (`.original`) for that "
                "step."
            )
        ctx.step.start(grads)
        return None, None, ctx.token


def plain_strides(shape: Sequence[int], strides: Sequence[int] | None) -> Tangent:
    """Return strides in which dimensions of one element, whose stride means nothing, agree."""
    if strides is None:
        return None
    return tuple(0 if size <= 1 else stride for size, stride in zip(shape, strides, strict=True))
