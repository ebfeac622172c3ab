"""One forward and its backward, while they run: the saved tensors and the state of the backward.

The only decision here is which program fits the arriving gradients. Their number and strides were
recorded with the step; another kind of backward gets another recording.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.device import KeptGenerators, RngState
from rkgb.elements import running_on, settled
from rkgb.graphs import BackwardKind, ambient_autocast
from rkgb.torch_api import (
    KernelChoice,
    RecomputingAs,
    changing_modes,
    current_dispatch_modes,
    is_in_checkpoint,
    keeps_graph,
    running_a_forward,
    straight_to_kernels,
)
from rockmate.errors import (
    BackwardTwiceError,
    ChangedTensorError,
    DoubleBackwardError,
    UnsupportedModuleError,
)
from rockmate.runtime.backwards import Backwards, PythonOfBackward, Variant
from rockmate.runtime.executable import Executable
from rockmate.runtime.gradients.rails import OUT_OF_ORDER, Rail
from rockmate.runtime.gradients.shared_casts import SharedCasts, shared_casts
from rockmate.runtime.gradients.shared_uses import FirstsWatch
from rockmate.runtime.outputs import plain_strides
from rockmate.runtime.steps.inner_results import InnerResults
from rockmate.runtime.steps.outputs_held import OutputsHeld

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class RunningStep:
    """One forward and its backward: the saved tensors and the state of the backward."""

    # Initial values are class attributes: setting them in each step takes as long as a small
    # operation.
    rail: Rail | None = None
    started = False
    sent: list[Tensor] | None = None  # gradients that the program gets when it continues
    program: Generator[list[Tensor], list[Tensor] | None, None] | None = None
    place = 0  # the next place of the rail
    held: Sequence[Tensor] = ()
    watch: FirstsWatch | None = None
    kept: Mapping[str, Tensor] | None = None  # for another backward, with retain_graph
    aliases: Sequence[tuple[str, Tensor, int]] = ()  # outputs that share saved memory, and versions
    in_one_memory: Sequence[Sequence[tuple[str, Tensor, int]]] = ()  # outputs, and versions
    outputs_held: OutputsHeld | None = None
    # Positions in `saved` of what hooks on saved tensors hold, with the devices of random states.
    passed: Mapping[int, torch.device | None] | None = None
    mark = 0  # tells which program has saved them
    # For another backward, with retain_graph: the rest of `saved`, and what belongs to it.
    unpassed: tuple[list[Any], Sequence[Tensor], list[int], list[int]] | None = None
    start_random: KeptGenerators | None = None
    contents: Callable[[], str] | None = None  # names a tensor with changed content and old version
    choice: KernelChoice | None = None
    python: PythonOfBackward | None = None
    inner: InnerResults | None = None
    region: Any = None  # identifies the autocast region, in which plain PyTorch shares casts
    shared: SharedCasts | None = None
    rerunning: AbstractContextManager[None] = _NOTHING
    model: nn.Module | None = None  # for opaque calls of its submodules
    saved: list[Any]
    versions: list[int]
    storages: list[int]
    output_versions: list[int]
    start_versions: list[int]

    def __init__(
        self,
        backwards: Backwards,
        executable: Executable,
        external: Mapping[str, Tensor],
        variant: Variant,
        numbers: Sequence[Any] = (),
    ) -> None:
        self.backwards, self.executable, self.numbers = backwards, executable, numbers
        self.laid_for = executable
        self.laid = self.runs = executable.for_hooks(external)  # owner of the rail, and what runs
        self.external: Mapping[str, Tensor] | None = external
        self.variant: Variant | None = variant
        # Reading the flags takes as long as some small operations, so only if they are used.
        if executable.program.runs_again:
            self.choice = KernelChoice.now()

    def on_model(self) -> AbstractContextManager[None]:
        """Tell opaque calls which model's submodules they run."""
        return _NOTHING if self.model is None else running_on(self.model)

    def __del__(self) -> None:
        if self.rail is not None and not self.started:  # a forward without a backward
            self.laid.give_back(self.rail)

    # ------------------------------------------------------------------ the user's own tensors

    def remember_start(self, values: Sequence[Tensor]) -> None:
        """Store what a second backward needs to run the forward again."""
        self.start_versions = _versions(values)
        for place in self.executable.written_places:  # results do not depend on them
            self.start_versions[place] = -1
        if self.executable.is_random:
            self.start_random = KeptGenerators.keep(self._device)

    @property
    def _device(self) -> torch.device:
        return self.executable.basic.device

    def remember_versions(self, external: Mapping[str, Tensor]) -> None:
        saved, executable = self.saved, self.executable
        held = self.held = executable.read_held(external)
        if executable.runs_python or executable.holds_written:  # opaque calls may write to them
            self.versions = _versions(held)
        else:
            self.versions = [*executable.pick_held(self.start_versions)]
        self.storages = [t.untyped_storage()._cdata for t in held]
        self.output_versions = [saved[place]._version for place, _ in executable.outputs.saved]

    def remember_aliases(self, outputs: Sequence[Tensor], places: Sequence[int]) -> None:
        """Store versions of outputs that share memory with saved tensors.

        Views have their own versions. The memory itself is saved anyway.
        """
        names = self.executable.program.outputs
        self.aliases = [(names[p], outputs[p].detach(), outputs[p]._version) for p in places]

    def remember_shared(self, outputs: Sequence[Tensor]) -> None:
        """Store versions of outputs that share memory with each other."""
        names = self.executable.program.outputs
        self.in_one_memory = [
            [(names[p], outputs[p].detach(), outputs[p]._version) for p in places]
            for places in self.executable.outputs.shared
        ]

    def pass_to_hooks(self) -> list[Tensor]:
        """Return the saved tensors for autograd to save, so that hooks on saved tensors get them.

        Parameters stay here, and the backward checks whether they have changed; but a checkpoint
        gets all. The last tensor tells which program has saved them, with which numbers.
        """
        executable, saved = self.executable, self.saved
        self.aliases = ()
        basic = executable.basic
        kept = {} if is_in_checkpoint() else basic.parameters
        self.passed = {
            place: saved[place].device if isinstance(saved[place], RngState) else None
            for place, name in enumerate(executable.program.saved)
            if isinstance(saved[place], (Tensor, RngState)) and name not in kept
        }
        for place, name in enumerate(executable.held):
            if name not in kept:
                self.versions[place] = -1
        found: list[Tensor] = []
        for place, device in self.passed.items():
            found += [saved[place]] if device is None else saved[place].tensors
            saved[place] = None
        self.mark = hash((id(self.backwards), executable.program.saved, *self.numbers))
        return [*found, torch.tensor(self.mark, device="cpu")]

    def take_back(self, tensors: Sequence[Tensor]) -> None:
        """Continue with the tensors that the hooks return, at the beginning of each backward.

        Those of a checkpoint come from a second run of the user's forward, with other inputs,
        buffers and random numbers than this one perhaps. So this forward never runs again.

        Raises:
            ChangedTensorError: a second run has gone another way.
        """
        assert self.passed is not None
        *found, mark = tensors
        if mark.item() != self.mark:
            name = self.executable.basic.model_name
            raise ChangedTensorError(
                f"a checkpoint has run {name} again for the backward, and with another plan or "
                "other numbers than in the forward: an attribute or what the forward reads has "
                "changed meanwhile. Change it after the backward."
            )
        executable = self.executable = self.laid_for
        names = executable.program.saved
        if not self.started and keeps_graph():
            self.unpassed = [*self.saved], self.held, self.versions, self.storages
        elif self.started:
            assert self.unpassed is not None
            saved, self.held, self.versions, self.storages = self.unpassed
            self.saved = [*saved]
        rest = iter(found)
        for place, device in self.passed.items():
            if device is not None:
                self.saved[place] = RngState.of(rest, device)
                continue
            tensor = self.saved[place] = next(rest)
            if self.external is not None and names[place] in self.external:
                self.external = {**self.external, names[place]: tensor}
        # They have the values at the time of saving, without later changes of outputs.
        self.output_versions = [self.saved[p]._version for p, _ in executable.outputs.saved]

    def _check_storages(self) -> None:
        # Storages, not addresses: FSDP frees and refills the memory of a storage.
        storages = [t.untyped_storage()._cdata for t in self.held]
        if storages != self.storages:
            differ = list(map(operator.ne, storages, self.storages))
            self._changed(self.executable.held[differ.index(True)])

    def _check_outputs(self) -> None:
        pairs = zip(self.executable.outputs.saved, self.output_versions, strict=True)
        for (place, name), version in pairs:
            if self.saved[place]._version != version:
                self._output_changed(name)
        for name, alias, version in self.aliases:
            if alias._version != version:
                self._output_changed(name)
        self.aliases = ()

    def _check_shared(self, kind: BackwardKind) -> None:
        """Refuse a gradient of an output that was changed through another one in its memory.

        Plain PyTorch knows that one is a view of the other, and adds the change to its history.
        """
        roots = self.executable.basic.roots
        given = {name for name, t in zip(roots, kind.tangents, strict=True) if t is not None}
        for group in self.in_one_memory:
            changed = [name for name, alias, version in group if alias._version != version]
            others = given.intersection(name for name, _, _ in group).difference(changed[:1])
            if changed and others:
                raise ChangedTensorError(
                    f"the output '{changed[0]}' of a Rockmate module was changed in place between "
                    f"forward and backward, and the output '{min(others)}', which shares its "
                    "memory, has a gradient. Work on a copy: y = y.clone()."
                )
        self.in_one_memory = ()

    def _output_changed(self, name: str) -> None:
        raise ChangedTensorError(
            f"the output '{name}' of a Rockmate module was changed in place between "
            "forward and backward, which reads it. Work on a copy: y = y.clone()."
        )

    def _changed(self, name: str) -> None:
        raise ChangedTensorError(
            f"'{self.executable.told(name)}' was changed in place between the forward and the "
            "backward of a Rockmate module, and the backward needs its old content. Change "
            "parameters and inputs after backward, or run the forward again."
        )

    def _check_contents(self, changed: Callable[[], str]) -> None:
        if name := changed():
            raise ChangedTensorError(
                f"'{self.executable.told(name)}' was changed between the forward and the backward "
                "of a Rockmate module in a way that PyTorch does not count (through .data, numpy "
                "or shared memory), and the backward computes from its old content again. Change "
                "it after backward, or plan with a larger budget."
            )

    # ------------------------------------------------------------------ backward

    def start(self, grads: Sequence[Tensor | None]) -> None:
        """Begin the backward for these gradients of the outputs."""
        basic = self.executable.basic
        by_name = dict(zip(self.executable.program.outputs, grads, strict=True))
        arrived = [settled(by_name[name]) for name in basic.roots]
        strides = (None if g is None else plain_strides(g.shape, g.stride()) for g in arrived)
        kind = BackwardKind(tuple(strides), ambient_autocast())
        self.begin(kind, [grad for grad in arrived if grad is not None])

    def begin(self, kind: BackwardKind, given: list[Tensor]) -> None:
        """Begin a kind of backward, with the gradients that its program takes."""
        self.refuse_twice()
        if self.region is not None and (shared := shared_casts(self)) is not None:
            shared.begin(self)
        if current_dispatch_modes() and (modes := changing_modes()):
            raise UnsupportedModuleError(
                f"the backward of a Rockmate module runs inside of the mode '{modes[-1]}', which "
                "may change what its operations compute; its forward ran outside of it. Run both "
                "inside of it, or let the class of a mode that only looks say so: only_watches = "
                "True."
            )
        again, self.started = self.started, True
        self.program = self.watch = None  # of a backward that was aborted
        self.rerunning = _NOTHING
        if self.choice is not None and (now := KernelChoice.now()) != self.choice:
            self.rerunning = RecomputingAs(self.choice, now)
        if self.contents is not None:
            self._check_contents(self.contents)
        if self.inner is not None:
            self.inner.refuse_asked()
        if self.python is not None:
            self.python.refuse_changes(self.executable.basic.model_name)
        if again:
            assert self.kept is not None
            self._refuse_second(kind)
            if self.passed is None:
                self._run_again(kind, self.kept)
        self._check_outputs()
        self._check_shared(kind)
        self._check_storages()
        executable = self.executable
        if kind != executable.kind:
            executable = self._go_on_as(kind)
        elif self.outputs_held is not None:
            self._look_at_outputs(self.outputs_held)
        if executable.beyond:
            warnings.warn(executable.beyond, RuntimeWarning, stacklevel=2)
        self.backwards.latest = executable
        self.kept = self.external if keeps_graph() else None
        self.run_backward_of(executable, given)

    def casts(self) -> dict[str, int]:
        """Return the weights that are cast, with their ids."""
        assert self.external is not None
        return {name: id(self.external[name]) for name in self.laid_for.casts.leaves}

    def refuse_twice(self) -> None:
        """Refuse a second backward if the first ran without retain_graph.

        Raises:
            BackwardTwiceError: it ran without retain_graph.
        """
        if self.started and self.kept is None:
            raise BackwardTwiceError(
                "backward was called a second time on the same forward of a Rockmate module; its "
                "activations are gone after the first. Call the first with retain_graph=True, add "
                "the losses before calling backward, or run the forward again."
            )

    def run_backward_of(self, executable: Executable, given: list[Tensor]) -> None:
        """Begin the backward of an executable whose saved tensors are all present."""
        if self.kept is None:
            self.let_go()
        assert self.rail is not None
        runs = self.runs = executable.on_rail_of(self.laid_for, self.laid)
        self.place = 0
        self.program = runs.compiled.backward(
            self.saved, given, *runs.sums(), *runs.taken(self.numbers)
        )
        self.rail.carry(self)
        self.rail.refuse_late_hooks()
        if self.rail.has_hooks and self.kept is not None:
            self.give_all()
        elif executable is self.laid_for:
            self.watch = runs.watch()

    def _look_at_outputs(self, outputs: OutputsHeld) -> None:
        name = self.executable.basic.model_name
        self.backwards.has_warned = outputs.warn_above(self.backwards.room_bytes, name)
        self.outputs_held = None

    def give_all(self) -> None:
        """Compute the gradients of all places of the rail now, and store them there."""
        assert self.rail is not None
        self.rail.give_all()

    def let_go(self) -> None:
        """Drop everything that only another backward would need."""
        self.external = self.variant = None

    def _refuse_second(self, kind: BackwardKind) -> None:
        assert self.variant is not None
        executable = self.backwards.for_backward(kind, self.variant)
        if executable.runs_python:
            raise BackwardTwiceError(
                "backward was called a second time on the same forward of a Rockmate module with "
                "submodules that run whole, which are not run again. Add the losses before calling "
                "backward."
            )
        if executable.unrepeatable:
            raise BackwardTwiceError(
                "backward was called a second time on the same forward of a Rockmate module, and "
                f"the forward cannot be run again for it: it has changed '{executable.unrepeatable}"
                "', on which its results depend. Add the losses before calling backward."
            )

    def _go_on_as(self, kind: BackwardKind) -> Executable:
        """Return the executable for an unexpected kind of backward, with its tensors saved.

        A recording beside the saved tensors would not fit into the budget. So they are dropped, and
        the forward runs again.
        """
        assert self.variant is not None
        assert self.external is not None
        is_known = kind in self.backwards.variants
        again = self.executable.keeps_by_backward or (not is_known and self._can_run_again())
        outputs = {name: self.saved[place] for place, name in self.executable.outputs.saved}
        if again:
            self.saved.clear()
        expected = self.backwards.expected
        executable = self.backwards.for_backward(kind, self.variant)
        if self.passed is not None and executable.instead is not None:
            # A checkpoint around may run the same forward again, and counts what it saves.
            executable, self.backwards.expected = executable.instead(), expected
        if self.executable.is_apart or executable.is_apart:
            again = True
        elif not again and self.executable.missing_for(executable):
            again = self._can_run_again()
        if not again:
            self._change_to(executable)
            return executable
        external = self.external
        self.run_again_as(kind, executable)
        names = self.executable.program.saved
        # The caller holds the outputs already.
        self.saved[:] = [outputs.get(n, t) for n, t in zip(names, self.saved, strict=True)]
        self.remember_versions(external)
        return self.executable

    def run_again_as(self, kind: BackwardKind, executable: Executable) -> None:
        """Run the forward again for the backward of another executable.

        Raises:
            UnsupportedModuleError: it cannot run again.
        """
        assert self.external is not None
        if not executable.can_repeat or self.passed is not None:
            raise UnsupportedModuleError(
                "gradients have arrived at outputs of a Rockmate module in another way than "
                "before, and its forward, which was compiled or planned for the other way, cannot "
                "be run again. Run the step again: it is planned for such gradients from now on."
            )
        self.saved.clear()
        self._run_again(kind, self.external)

    def _can_run_again(self) -> bool:
        """Return whether a second forward gives the same: no opaque calls, and no changes since."""
        assert self.external is not None
        ran = self.executable
        if not ran.can_repeat or self.passed is not None:
            return False
        pairs = zip(ran.program.externals, self.start_versions, strict=True)
        return all(version < 0 or self.external[n]._version == version for n, version in pairs)

    def _run_again(self, kind: BackwardKind, external: Mapping[str, Tensor]) -> None:
        """Run the forward again for another backward: with equal results and no side effects."""
        assert self.variant is not None
        ran = self.laid_for
        names = ran.program.externals
        values = [external[name] for name in names]
        for name, tensor, version in zip(names, values, self.start_versions, strict=True):
            if version >= 0 and tensor._version != version:
                self._changed(name)
        executable = self.backwards.for_backward(kind, self.variant)
        now = KeptGenerators.keep(self._device) if self.start_random is not None else None
        if self.start_random is not None:
            self.start_random.restore()
        names = executable.program.externals
        values = [external[n].clone() if n in ran.written else external[n] for n in names]
        try:
            with straight_to_kernels(), self.rerunning, running_a_forward():
                taken = executable.taken(self.numbers)
                _, self.saved = executable.compiled.forward_again(values, *taken)
        finally:
            if now is not None:
                now.restore()
        self.executable = executable
        self.remember_versions(external)

    def _change_to(self, executable: Executable) -> None:
        """Continue with the backward of another executable, from this forward's saved tensors."""
        names = self.executable.program.saved
        values = dict(zip(names, self.saved, strict=True))
        assert self.external is not None
        values.update({n: t for n, t in self.external.items() if n not in values})
        if missing := self.executable.missing_for(executable):
            raise UnsupportedModuleError(
                "gradients have arrived at outputs of a Rockmate module in another way than "
                f"before, and their backward needs '{missing[0]}', which this forward has not "
                "kept. Run the step again: it is planned for such gradients from now on."
            )
        self.saved[:] = [values[name] for name in executable.program.saved]
        held = dict(zip(self.executable.held, self.versions, strict=True))
        self.executable = executable
        self.held = executable.read_held(self.external)
        self.versions = [
            held.get(name, tensor._version)
            for name, tensor in zip(executable.held, self.held, strict=True)
        ]

    def advance(self, place: int) -> Sequence[Tensor | None]:
        """Run the program to its next hand-over; return the gradients of number `place`."""
        if self.program is None or place != self.place:
            raise BackwardTwiceError(OUT_OF_ORDER)
        assert self.rail is not None
        leaves = self.rail.layout.leaves
        found: tuple[Tensor | None, ...]
        if place < len(self.runs.reads):
            found = self.run(place)
            if self.watch is not None:
                self.watch.look(place, found)
        else:  # these gradients lead to no leaf
            found = (None,) * len(leaves[place])
        self.place += 1
        if self.place == len(leaves):
            if self.watch is not None:
                self.watch.finish()
            self.finish()
        return found

    def run(self, give: int) -> tuple[Tensor | None, ...]:
        """Run the program to its next hand-over; return its gradients."""
        assert self.program is not None
        self._check_reads(give)
        with straight_to_kernels(), self.on_model(), self.rerunning:
            given = self.program.send(self.sent)
        found = tuple(given)
        given.clear()  # autograd keeps gradients without a copy only if no one else holds them
        if self.shared is not None:
            return self.shared.pass_on(self, self.runs.casts.given[give], found)
        return found

    def _check_reads(self, give: int) -> None:
        versions, held = self.versions, self.held
        for index in self.runs.reads[give]:
            if held[index]._version != versions[index] and versions[index] >= 0:
                self._changed(self.executable.held[index])

    def finish(self) -> None:
        """End the step, after its last hand-over."""
        self.program = None
        self.held = ()
        if self.shared is not None:
            self.shared.finish(self)
            self.shared = None
        if self.kept is not None:  # the rail may be needed again
            return
        if self.rail is not None:
            self.laid.give_back(self.rail)
        self.rail = None


def refuse_create_graph() -> None:
    """Refuse a backward with create_graph=True.

    Raises:
        DoubleBackwardError: create_graph is set.
    """
    if torch.is_grad_enabled():  # autograd enables it in a backward for create_graph=True only
        raise DoubleBackwardError(
            "backward with create_graph=True was asked of a Rockmate module, whose gradients "
            "cannot be differentiated again. Run the forward of that step under `with "
            "rockmate.plain():`, as plain PyTorch."
        )


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [t._version for t in tensors]
    except RuntimeError:  # of an inference tensor
        return [-1 if t.is_inference() else t._version for t in tensors]
