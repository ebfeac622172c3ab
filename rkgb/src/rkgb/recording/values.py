"""Facts about the values of a step: their names, their origins, their writers.

Names are attached to live tensor objects by weak references.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rkgb.device.chosen import device_of
from rkgb.elements.tensor_info import TensorInfo, storage_id, storage_of


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


class LiveNames:
    """The name of each live tensor, and the facts about every name."""

    def __init__(self, holds: Callable[[Tensor], bool]) -> None:
        self._holds = holds
        self.infos: dict[str, TensorInfo] = {}
        self._names: dict[int, str] = {}
        self._watch: dict[int, weakref.ref[Tensor]] = {}
        self._by_storage: dict[int, dict[int, weakref.ref[Tensor]]] = {}
        self._stand_ins: dict[int, int] = {}  # storage -> offset of the value in it
        self.empty: dict[int, torch.dtype] = {}  # storages without content
        self._taken: dict[str, int] = {}

    def of(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor, or of another one with the same memory and geometry."""
        name = self._names.get(id(tensor))
        if name is not None:
            return name
        for key, reference in self._by_storage.get(storage_id(tensor), {}).items():
            other = reference()
            if other is not None and _geometry(other) == _geometry(tensor):
                name = self._names[key]
                self.bind(name, tensor, storage_id(tensor))
                return name
        return None

    def own_name_of(self, tensor: Tensor) -> str | None:
        """Return the name of exactly this object."""
        return self._names.get(id(tensor))

    def tensor(self, name: str) -> Tensor:
        """Return a live tensor by its name."""
        found = (self._watch[key]() for key, other in self._names.items() if other == name)
        return next(tensor for tensor in found if tensor is not None)

    def take(self, name: str) -> None:
        """Reserve a name."""
        self._taken[name] = 1

    def fresh(self, base: str) -> str:
        """Return an unused name that starts with `base`."""
        count = self._taken.get(base, 0)
        self._taken[base] = count + 1
        name = f"{base}_{count}" if count else base
        return name if not count or name not in self.infos else self.fresh(base)

    def define(self, name: str, tensor: Tensor, storage: Any, root: str) -> None:
        """Note what there is to know of a new value, and let the tensor go by its name."""
        info = TensorInfo.of(tensor, root, storage.nbytes(), is_on_host=not self._holds(tensor))
        shift = self._stand_ins.get(storage._cdata)
        if shift is not None:
            whole = self.infos[root].storage_bytes
            info = replace(info, offset=info.offset + shift, storage_bytes=whole)
        self.infos[name] = info
        self.bind(name, tensor, storage._cdata)

    def stand_in(self, name: str, tensor: Tensor) -> None:
        """Give `tensor` the name of a value whose content has been given up.

        Its offset in its storage may differ, and so may those of all its views.
        """
        self.bind(name, tensor, storage_id(tensor))
        shift = self.infos[name].offset - int(tensor.storage_offset())
        self._stand_ins[storage_id(tensor)] = shift

    def bind(self, name: str, tensor: Tensor, storage: int) -> None:
        """Give the tensor this name for as long as it lives."""
        key = id(tensor)
        names, watch, table = self._names, self._watch, self._by_storage
        stand_ins, empty = self._stand_ins, self.empty

        def forget(reference: weakref.ref[Tensor]) -> None:
            if watch.get(key) is reference:
                del watch[key]
                names.pop(key, None)
            group = table.get(storage)
            if group is not None and group.get(key) is reference:
                del group[key]
                if not group:
                    del table[storage]
                    stand_ins.pop(storage, None)
                    empty.pop(storage, None)

        names[key] = name
        reference = weakref.ref(tensor, forget)
        watch[key] = reference
        group = table.get(storage)
        if group is None:
            table[storage] = {key: reference}
        else:
            group[key] = reference

    def alias_of(self, storage: int) -> str | None:
        """Return the name of the value that made a storage."""
        for key, reference in self._by_storage.get(storage, {}).items():
            if reference() is not None:
                return self.infos[self._names[key]].alias_of
        return None

    def living(self) -> Iterator[str]:
        """Yield the name of the maker of each live storage."""
        for group in list(self._by_storage.values()):
            for key, reference in list(group.items()):
                if reference() is not None and key in self._names:
                    yield self.infos[self._names[key]].alias_of
                    break

    def overlap(self, first: str, second: str) -> bool:
        """Return whether two values of one storage overlap (parts of a split do not)."""
        a, b = self.infos[first], self.infos[second]
        with torch.no_grad():
            elements = torch.zeros(
                a.storage_bytes // a.dtype.itemsize, dtype=torch.bool, device="cpu"
            )
            elements.as_strided(a.shape, a.stride, a.offset).fill_(True)
            return a.dtype != b.dtype or bool(
                elements.as_strided(b.shape, b.stride, b.offset).any()
            )


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
