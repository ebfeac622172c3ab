"""Records a step on tensors without content: nothing is computed, and no memory is used.

Kernels are chosen as for real tensors on the same device. Reads of values by Python and sizes that
depend on data are refused. A kernel that may draw random numbers is assumed to do so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rkgb.elements.tensor_info import storage_id
from rkgb.recording.kernels import tensors_returned
from rkgb.recording.recorder import Recorder
from rkgb.torch_api.torch_private import (
    ASKS_GEOMETRY,
    asks_content,
    pytree,
    weak_storage,
    with_content,
)

_MOST_BYTES = 64 << 20  # limit of the arguments of a kernel that is called for its results' sizes


class SizeRecorder(Recorder):
    """Records operations on tensors without content."""

    def __init__(self, held_bytes: dict[str, int], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.held_bytes = held_bytes  # of plain PyTorch after each operation, by its name
        self._storages: dict[int, tuple[Any, int]] = {}
        self._outside: list[Tensor] = []  # kept alive, so that ids of storages stay unique
        self._own: set[int] = set()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if str(func.__name__).split(".")[0] in ASKS_GEOMETRY:
            return func(*args, **kwargs)
        try:
            result = super().run(func, args, kwargs)
        except Exception as error:
            if not asks_content(error):
                raise
            raise self.reads_data("a number or a size that Python reads") from error
        if not self.is_paused:
            self._weigh(result)
        return result

    def add_external(self, name: str, tensor: Tensor, kind: str) -> str:
        """Name a tensor that exists before the step; its memory is not the step's."""
        self._outside.append(tensor)
        self._own.add(storage_id(tensor))
        name = super().add_external(name, tensor, kind)
        if kind == "constant":  # only constants have content
            self.known.add(name)
        return name

    def _weigh(self, result: Any) -> None:
        """Store the bytes that are held now: live storages, each once."""
        for tensor in tensors_returned(result)[0] or ():
            if tensor is not None:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._storages and storage._cdata not in self._own:
                    self._storages[storage._cdata] = (weak_storage(storage), storage.nbytes())
        ops = self.backward if self.in_backward else self.forward
        gone = [key for key, (reference, _) in self._storages.items() if reference.expired()]
        for key in gone:
            del self._storages[key]
        if ops:
            held = sum(size for _, size in self._storages.values())
            self.held_bytes[ops[-1].name] = max(held, self.held_bytes.get(ops[-1].name, 0))

    def read_content(self, tensor: Tensor, what: str) -> None:
        """Refuse reads of values, except for values made from numbers."""
        if not self.is_paused and not self.knows_value_of(tensor):
            raise self.reads_data(f"control flow or what '{what}' gives")

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        tensors, many = tensors_returned(result)
        kept = [t for t in tensors or () if t is not None and t.dtype is torch.uint8]
        if not many or self.in_backward or all(t.numel() for t in kept):
            return result
        return self._with_real_sizes(func, args, kwargs, result)

    def _with_real_sizes(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> Any:
        """Return the result with the real sizes of tensors that the kernel saves.

        Only the kernel knows these sizes, so it is called once on zeros, if they are small.
        """
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if sum(t.numel() * t.element_size() for t in given) > _MOST_BYTES:
            return result

        def real(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            shape, stride = value.shape, value.stride()
            made = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
            return made.zero_()

        with with_content():
            found = func(*pytree.tree_map(real, args), **pytree.tree_map(real, dict(kwargs)))
            sizes = [t.numel() if isinstance(t, Tensor) else 0 for t in found]
        return type(result)(
            t.new_empty(size)
            if isinstance(t, Tensor) and t.dtype is torch.uint8 and not t.numel()
            else t
            for t, size in zip(result, sizes, strict=True)
        )

    def _snapshots(self, inputs: Sequence[str], writes: Sequence[str]) -> dict[str, Tensor]:
        return {}  # buffers have no content that could change

    def _has_drawn(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if func.namespace != "aten":
            return False
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        # Attention and dropout draw if their probability is not 0, and in training mode.
        never = given.get("dropout_p", given.get("p", 1.0)) == 0
        return not never and given.get("train", True) is not False
