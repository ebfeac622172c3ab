"""One forward and its backward, while they run: the saved tensors and the state of the backward.

The only decision here is which program fits the arriving gradients. Their number and strides were
recorded with the step; another kind of backward gets another recording.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.device import KeptGenerators
from rkgb.elements import running_on, settled
from rkgb.graphs import BackwardKind, ambient_autocast
from rkgb.torch_api import (
    KernelChoice,
    RecomputingAs,
    changing_modes,
    current_dispatch_modes,
    keeps_graph,
    running_a_forward,
    straight_to_kernels,
)
from rockmate.errors import BackwardTwiceError, DoubleBackwardError, UnsupportedModuleError
from rockmate.guards.read_in_backward import PythonOfBackward
from rockmate.runtime.backwards import Backwards, Variant
from rockmate.runtime.executable import Executable
from rockmate.runtime.gradients.rails import OUT_OF_ORDER, Rail
from rockmate.runtime.gradients.shared_casts import SharedCasts, shared_casts
from rockmate.runtime.gradients.shared_uses import FirstsWatch
from rockmate.runtime.outputs import OutputsHeld, plain_strides
from rockmate.runtime.steps.inner_results import InnerResults
from rockmate.runtime.steps.saved_tensors import SavedTensors

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class RunningStep(SavedTensors):
    """One forward and its backward: the saved tensors and the state of the backward."""

    rail: Rail | None = None
    sent: list[Tensor] | None = None  # gradients that the program gets when it continues
    program: Generator[list[Tensor], list[Tensor] | None, None] | None = None
    place = 0  # the next place of the rail
    watch: FirstsWatch | None = None
    kept: Mapping[str, Tensor] | None = None  # for another backward, with retain_graph
    outputs_held: OutputsHeld | None = None
    choice: KernelChoice | None = None
    python: PythonOfBackward | None = None
    inner: InnerResults | None = None
    region: Any = None  # identifies the autocast region, in which plain PyTorch shares casts
    shared: SharedCasts | None = None
    rerunning: AbstractContextManager[None] = _NOTHING
    model: nn.Module | None = None  # for opaque calls of its submodules

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

    def start(self, grads: Sequence[Tensor | None]) -> None:
        """Begin the backward for these gradients of the outputs."""
        by_name = dict(zip(self.executable.program.outputs, grads, strict=True))
        self.begin_with([settled(by_name[name]) for name in self.executable.basic.roots])

    def begin_with(self, arrived: Sequence[Tensor | None]) -> None:
        """Begin the backward for the gradients of all roots, where they have one."""
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
        self.check_contents()
        if self.inner is not None:
            self.inner.refuse_asked()
        if self.python is not None:
            self.python.refuse_changes(self.executable.basic.model_name)
        if again:
            assert self.kept is not None
            self._refuse_second(kind)
            if self.passed is None:
                self._run_again(kind, self.kept)
        self.check(kind)
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
        self.external = self.variant = self.contents = self.python = None

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
            raise arrived_otherwise(
                "its forward, which was compiled or planned for the other way, cannot be run again"
            )
        self.saved.clear()
        self._run_again(kind, self.external)

    def _can_run_again(self) -> bool:
        """Return whether a second forward gives the same: no opaque calls, and no changes since."""
        if not self.executable.can_repeat or self.passed is not None:
            return False
        assert self.external is not None
        return not self.changed_since_start(self.external)

    def _run_again(self, kind: BackwardKind, external: Mapping[str, Tensor]) -> None:
        """Run the forward again for another backward: with equal results and no side effects."""
        assert self.variant is not None
        ran = self.laid_for
        if name := self.changed_since_start(external):
            self.refuse_changed(name)
        executable = self.backwards.for_backward(kind, self.variant)
        now = KeptGenerators.keep(self.device) if self.start_random is not None else None
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
            raise arrived_otherwise(
                f"their backward needs '{missing[0]}', which this forward has not kept"
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
        self.check_reads(self.runs.reads[give])
        with straight_to_kernels(), self.on_model(), self.rerunning:
            given = self.program.send(self.sent)
        found = tuple(given)
        given.clear()  # autograd keeps gradients without a copy only if no one else holds them
        if self.shared is not None:
            return self.shared.pass_on(self, self.runs.casts.given[give], found)
        return found

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


def arrived_otherwise(why: str) -> UnsupportedModuleError:
    """Return the error for gradients that this step cannot go on with; `why` says why not."""
    return UnsupportedModuleError(
        "gradients have arrived at outputs of a Rockmate module in another way than before, and "
        f"{why}. Run the step again: it is planned for such gradients from now on."
    )


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
