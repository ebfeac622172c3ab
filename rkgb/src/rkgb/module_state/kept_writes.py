"""Parameters that a forward writes to: saved before the first write, and restored.

Copies of a module share the memory of its parameters, which may be most of the device's memory. So
a parameter is copied only when an operation is about to write to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.elements.spread import memory_of
from rkgb.elements.tensor_info import storage_id
from rkgb.errors import SideEffectError
from rkgb.outside.known import note_written
from rkgb.torch_api.private.autograd import set_version
from rkgb.torch_api.private.modes import DispatchMode
from rkgb.torch_api.private.tables import pytree
from rkgb.torch_api.tensor_facts import placed_parameters


class KeptWrites(DispatchMode):
    """While active, saves those of these tensors that operations are about to write.

    They are restored at exit. So are others that were there before, except for those `but` which
    it looks everywhere: from now on, whoever runs a step for planning puts these back.
    """

    only_watches = True

    def __init__(
        self, tensors: Iterable[tuple[str, Tensor]], but: Iterable[Tensor] | None = None
    ) -> None:
        super().__init__()
        # Storages of these, and of what has been made meanwhile.
        self._made = None if but is None else {storage_id(t) for t in but if _is_strided(t)}
        self._named: dict[int, list[tuple[str, Tensor]]] = {}
        for name, tensor in tensors:
            if _is_strided(tensor) and memory_of(tensor) is tensor:
                self._named.setdefault(storage_id(tensor), []).append((name, tensor))
        self._kept: dict[int, KeptTensors] = {}

    @property
    def written(self) -> tuple[str, ...]:
        """The names of the written tensors."""
        return tuple(name for key in self._kept for name, _ in self._named.get(key, ()))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.keep(func, args, kwargs)
        result = func(*args, **kwargs)
        if self._made is not None:
            made = (t for t in pytree.tree_leaves(result) if isinstance(t, Tensor))
            self._made.update(storage_id(t) for t in made if _is_strided(t))
        return result

    def keep(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Save the tensors that an operation is about to write."""
        for where in written_by(func):
            value = kwargs.get(where[1]) if where[0] >= len(args) else args[where[0]]
            for tensor in pytree.tree_leaves(value):
                if isinstance(tensor, Tensor) and _is_strided(tensor):
                    key = storage_id(memory_of(tensor))
                    if key in self._named and key not in self._kept:
                        self._kept[key] = KeptTensors(tensor for _, tensor in self._named[key])
                    elif self._made is not None and key not in self._made | self._kept.keys():
                        whole = tensor if tensor._base is None else tensor._base
                        self._kept[key] = KeptTensors([whole])
                        note_written(whole)

    def restore(self) -> None:
        """Restore the written tensors."""
        for contents in self._kept.values():
            contents.restore()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.restore()


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


class KeptTensors:
    """Contents, memory and versions of some tensors, for restoring them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        with torch.no_grad():
            self._copies = [(t, t.detach(), t.detach().clone(), t._version) for t in tensors]

    @classmethod
    def given(cls, values: Iterable[Any]) -> KeptTensors:
        """Return what `restore_written` restores of the tensors among arguments."""
        tensors = (t for t in values if isinstance(t, Tensor) and t.layout is torch.strided)
        return cls(t for t in tensors if not t.is_inference() and memory_of(t) is t)

    def restore_written(self) -> None:
        """Restore those that operations have written to."""
        self._restore([row for row in self._copies if row[0]._version != row[3]])

    def restore(self) -> None:
        """Restore memory and content."""
        self._restore(self._copies)

    def _restore(self, rows: Iterable[tuple[Tensor, Tensor, Tensor, int]]) -> None:
        with torch.no_grad():
            for tensor, own, copy, version in rows:
                if tensor.data_ptr() != own.data_ptr():
                    tensor.data = own
                tensor.copy_(copy)
                set_version(tensor, version)


class ParameterPlaces:
    """The memory of a module's parameters, to find those that get other memory."""

    def __init__(self, module: nn.Module) -> None:
        every = placed_parameters(module)
        strided = [(n, p) for n, p in every if p.layout is torch.strided]
        self._before = [(n, p, p.detach()) for n, p in strided]

    def moved(self) -> list[str]:
        """Return the names of the parameters that have other memory now."""
        return [
            name
            for name, parameter, own in self._before
            if storage_id(memory_of(parameter)) != storage_id(memory_of(own))
        ]

    def put_back(self) -> list[str]:
        """Restore the memory of parameters; return the names of those that had other memory."""
        moved = self.moved()
        for name, parameter, own in self._before:
            if name in moved:
                parameter.data = own
        return moved

    def refuse_moves(self) -> None:
        """Refuse a forward that has given a parameter other memory.

        Raises:
            SideEffectError: a parameter has other memory.
        """
        for name in self.put_back():
            raise SideEffectError(
                f"the forward gives the parameter '{name}' other memory, where neither a plan nor "
                "an optimizer's views would follow. Write into it: with torch.no_grad(): "
                "parameter.copy_(...).",
                module_path="",
            )


@cache
def written_by(func: Any) -> tuple[tuple[int, str], ...]:
    """Return (position, name) of the arguments that an operation writes."""
    arguments = func._schema.arguments if hasattr(func, "_schema") else ()
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
