"""Facts about the values of a step: their names, their origins, their writers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rkgb.device.chosen import device_of
from rkgb.elements.tensor_info import TensorInfo, storage_of
from rkgb.recording.names import LiveNames


class Values:
    """The values that a step has read and made so far."""

    def __init__(self, device: torch.device) -> None:
        self.names = LiveNames(device_of(device).holds)
        self.infos = self.names.infos
        self.constants: dict[str, Tensor] = {}
        self.kinds: dict[str, str] = {}  # 'parameter', 'input', 'buffer' of externals
        self.buffers: dict[str, Tensor] = {}
        self.resident: set[str] = set()  # roots that exist before the step
        self.known: set[str] = set()  # values made only from numbers
        self.given: set[str] = set()  # values made from these and from external values
        self.wanting: set[str] = set()  # values with requires_grad
        # Storage -> (operation, value written), and storages that no operation has written yet.
        self.written: dict[str, list[tuple[int, str]]] = {}
        self.blank: set[str] = set()

    def add_external(self, name: str, tensor: Tensor, kind: str) -> str:
        """Name a tensor that exists before the step; the caller keeps it alive."""
        known = self.names.own_name_of(tensor)
        if known is not None:
            return known
        self.names.take(name)
        storage = storage_of(tensor)
        root = self.names.alias_of(storage._cdata) or name
        self.names.define(name, tensor, storage, root)
        self.kinds[name] = kind
        self.resident.add(root)
        if kind == "buffer":
            self.buffers[name] = tensor
        elif kind == "constant":
            self.constants[name] = tensor
        if kind in ("input", "buffer", "constant"):
            self.given.add(name)
        return name

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor, or of one that is equal to it in memory and geometry."""
        return self.names.of(tensor)

    def results_of(
        self, base: str, tensors: Sequence[Tensor | None], *, may_alias: bool = True
    ) -> tuple[str, ...]:
        """Name the results of an operation, '' for values that are no tensors."""
        results = []
        for tensor in tensors:
            if tensor is None:
                results.append("")
                continue
            name = self.names.fresh(base)
            storage = storage_of(tensor)
            root = self.names.alias_of(storage._cdata) if may_alias else None
            self.names.define(name, tensor, storage, root or name)
            results.append(name)
        return tuple(results)

    def declare(self, base: str, size_bytes: int) -> str:
        """Name a value that is no tensor and holds memory."""
        name = self.names.fresh(base)
        self.infos[name] = TensorInfo((0,), torch.uint8, (1,), False, name, 0, size_bytes)
        return name

    def is_resident(self, name: str) -> bool:
        """Return whether the value lies in memory from before the step."""
        return self.infos[name].alias_of in self.resident

    def is_overwritten(self, name: str) -> bool:
        """Return whether a value lies in memory from before the step to which the step writes."""
        root = self.infos[name].alias_of
        return root in self.resident and root in self.written

    def knows_value_of(self, tensor: Tensor) -> bool:
        """Return whether the tensor was made only from numbers."""
        name = self.name_of(tensor)
        return name is None or name in self.known

    def note_writes(self, names: Sequence[str], count: int) -> None:
        """Note that the operation with this number writes to values."""
        for name in names:
            root = self.infos[name].alias_of
            self.written.setdefault(root, []).append((count, name))
            self.blank.discard(root)

    def follow(
        self,
        results: Sequence[str],
        writes: Sequence[str],
        *,
        known: bool,
        given: bool,
        is_random: bool,
    ) -> None:
        """Store whether only numbers, or only inputs, determine the results of an operation."""
        if writes:
            self.known.difference_update(writes)
            roots = {self.infos[name].alias_of for name in writes}
            # A guard must not write to its inputs.
            if not given or is_random or not roots.isdisjoint(self.resident):
                self.given -= {n for n in self.given if self.infos[n].alias_of in roots}
        elif known and not is_random:
            self.known.update(filter(None, results))
        if given and not is_random:
            self.given.update(n for n in results if n and not self.is_overwritten(n))

    def forget_origin(self, names: Sequence[str]) -> None:
        """Mark values in the memory of these as of unknown origin."""
        roots = {self.infos[name].alias_of for name in names if name}
        for values in (self.known, self.given):
            values -= {name for name in values if self.infos[name].alias_of in roots}
