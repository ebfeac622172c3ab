"""The saved tensors of one forward, and whether its backward may still read them.

Plain PyTorch refuses a backward whose saved tensors were changed in place. So does this one, by
their versions. It also reads parameters, inputs and outputs that the user holds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from rkgb.device import KeptGenerators, RngState
from rkgb.graphs import BackwardKind
from rkgb.torch_api import is_in_checkpoint, keeps_graph
from rockmate.errors import ChangedTensorError
from rockmate.runtime.backwards import Backwards
from rockmate.runtime.executable import Executable


class SavedTensors:
    """What a forward saves, and the versions of all that its backward reads."""

    # Initial values are class attributes: setting them in each step takes as long as a small
    # operation.
    backwards: Backwards
    executable: Executable  # whose tensors are saved
    laid_for: Executable  # which ran the forward
    external: Mapping[str, Tensor] | None
    numbers: Sequence[Any]
    started = False
    held: Sequence[Tensor] = ()
    aliases: Sequence[tuple[str, Tensor, int]] = ()  # outputs that share saved memory, and versions
    in_one_memory: Sequence[Sequence[tuple[str, Tensor, int]]] = ()  # outputs, and versions
    # Positions in `saved` of what hooks on saved tensors hold, with the devices of random states.
    passed: Mapping[int, torch.device | None] | None = None
    mark = 0  # tells which program has saved them
    # For another backward, with retain_graph: the rest of `saved`, and what belongs to it.
    unpassed: tuple[list[Any], Sequence[Tensor], list[int], list[int]] | None = None
    start_random: KeptGenerators | None = None
    contents: Callable[[], str] | None = None  # names a tensor with changed content and old version
    saved: list[Any]
    versions: list[int]
    storages: list[int]
    output_versions: list[int]
    start_versions: list[int]

    def remember_start(self, values: Sequence[Tensor]) -> None:
        """Store what a second backward needs to run the forward again."""
        self.start_versions = _versions(values)
        for place in self.executable.written_places:  # results do not depend on them
            self.start_versions[place] = -1
        if self.executable.is_random:
            self.start_random = KeptGenerators.keep(self.device)

    @property
    def device(self) -> torch.device:
        """The device of the step."""
        return self.executable.basic.device

    def remember_versions(self, external: Mapping[str, Tensor]) -> None:
        """Store versions and storages of what the backward reads of the user's tensors."""
        saved, executable = self.saved, self.executable
        held = self.held = executable.read_held(external)
        if executable.runs_python or executable.holds_written:  # opaque calls may write to them
            self.versions = _versions(held)
        else:
            self.versions = [*executable.pick_held(self.start_versions)]
        self.storages = [t.untyped_storage()._cdata for t in held]
        self.output_versions = [saved[place]._version for place, _ in executable.outputs.saved]

    def remember_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Store versions of outputs that share memory with saved tensors, or with each other.

        Views have their own versions. The memory itself is saved anyway.
        """
        executable, names = self.executable, self.executable.program.outputs

        def versions_of(places: Sequence[int]) -> list[tuple[str, Tensor, int]]:
            return [(names[p], outputs[p].detach(), outputs[p]._version) for p in places]

        if aliased := executable.outputs.aliased:
            self.aliases = versions_of(aliased)
        if shared := executable.outputs.shared:
            self.in_one_memory = [versions_of(places) for places in shared]

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

    def check(self, kind: BackwardKind) -> None:
        """Refuse changes since the forward that would show in this kind of backward.

        Raises:
            ChangedTensorError: an output or a held tensor has changed.
        """
        pairs = zip(self.executable.outputs.saved, self.output_versions, strict=True)
        changed = [name for (place, name), v in pairs if self.saved[place]._version != v]
        changed += [name for name, alias, version in self.aliases if alias._version != version]
        if changed:
            raise ChangedTensorError(
                f"the output '{changed[0]}' of a Rockmate module was changed in place between "
                "forward and backward, which reads it. Work on a copy: y = y.clone()."
            )
        self.aliases = ()
        self._check_shared(kind)
        # Storages, not addresses: FSDP frees and refills the memory of a storage.
        storages = [t.untyped_storage()._cdata for t in self.held]
        if storages != self.storages:
            differ = list(map(operator.ne, storages, self.storages))
            self.refuse_changed(self.executable.held[differ.index(True)])

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

    def changed_since_start(self, external: Mapping[str, Tensor]) -> str:
        """Return the name of an external that has changed since the forward began, or ''."""
        pairs = zip(self.laid_for.program.externals, self.start_versions, strict=True)
        changed = (name for name, v in pairs if v >= 0 and external[name]._version != v)
        return next(changed, "")

    def refuse_changed(self, name: str) -> NoReturn:
        """Refuse a backward that would read what has changed.

        Raises:
            ChangedTensorError: always.
        """
        raise ChangedTensorError(
            f"'{self.executable.told(name)}' was changed in place between the forward and the "
            "backward of a Rockmate module, and the backward needs its old content. Change "
            "parameters and inputs after backward, or run the forward again."
        )

    def check_contents(self) -> None:
        """Refuse a change of contents that no version counts.

        Raises:
            ChangedTensorError: there is one.
        """
        if self.contents is not None and (name := self.contents()):
            raise ChangedTensorError(
                f"'{self.executable.told(name)}' was changed between the forward and the backward "
                "of a Rockmate module in a way that PyTorch does not count (through .data, numpy "
                "or shared memory), and the backward computes from its old content again. Change "
                "it after backward, or plan with a larger budget."
            )

    def check_reads(self, indices: Sequence[int]) -> None:
        """Refuse a change of what the backward reads next; the indices are those in `held`."""
        versions, held = self.versions, self.held
        for index in indices:
            if versions[index] >= 0 and held[index]._version != versions[index]:
                self.refuse_changed(self.executable.held[index])


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [t._version for t in tensors]
    except RuntimeError:  # of an inference tensor
        return [-1 if t.is_inference() else t._version for t in tensors]
