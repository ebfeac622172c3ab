"""Offload as people write it by hand: everything of a kind is moved, when it is saved.

A copy is complete before the step goes on, as in `torch.autograd.graph.save_on_cpu` without pinned
memory. Copies on the host are no tensors, so that the allocator of a CPU does not count them.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from harness.networks import Case

_LEAST_BYTES = 1 << 16  # smaller tensors stay


class Place(Protocol):
    """Where bytes may be kept."""

    def write(self, data: np.ndarray[Any, Any]) -> Any:
        """Keep a copy and return where it is."""

    def read(self, at: Any, target: np.ndarray[Any, Any]) -> None:
        """Copy back what is kept there."""


class InMemory:
    """Copies in the memory of the process."""

    def write(self, data: np.ndarray[Any, Any]) -> Any:
        return data.copy()

    def read(self, at: Any, target: np.ndarray[Any, Any]) -> None:
        target[:] = at


class InFile:
    """Copies in a file without a name, in the folder for temporary files."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed with its last tensor)

    def __del__(self) -> None:
        self.file.close()

    def write(self, data: np.ndarray[Any, Any]) -> Any:
        at = self.file.seek(0, 2)
        self.file.write(memoryview(data))
        return at

    def read(self, at: Any, target: np.ndarray[Any, Any]) -> None:
        self.file.seek(at)
        self.file.readinto(memoryview(target))


class Hooks:
    """Hooks on saved tensors that move all large ones but parameters; one object for each step."""

    def __init__(self, place: Place, model: nn.Module) -> None:
        self.place = place
        self.own = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}

    def out(self, tensor: Tensor) -> Any:
        """Return where a saved tensor is kept, or the tensor itself."""
        if tensor.nbytes < _LEAST_BYTES or tensor.untyped_storage()._cdata in self.own:
            return tensor
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        return self.place.write(data), tensor.dtype, tensor.shape

    def back(self, kept: Any) -> Tensor:
        """Return the tensor again."""
        if isinstance(kept, Tensor):
            return kept
        at, dtype, shape = kept
        tensor = torch.empty(shape, dtype=dtype)
        self.place.read(at, tensor.view(-1).view(torch.uint8).numpy())
        return tensor

    def around(self) -> saved_tensors_hooks:
        """Return the context in which tensors are saved."""
        return saved_tensors_hooks(self.out, self.back)


PLACES: dict[str, Callable[[], Place]] = {"host": InMemory, "disk": InFile}


def saved_tensors_moved(setting: str, case: Case, model: nn.Module) -> Callable[[], Tensor]:
    """Move every large tensor that a node saves; the setting is the place."""

    def forward() -> Tensor:
        with Hooks(PLACES[setting](), model).around():
            return model(*case.sample)

    return forward


def layer_inputs_moved(setting: str, case: Case, model: nn.Module) -> Callable[[], Tensor]:
    """A checkpoint around every block, whose input is moved; the setting is the place."""
    current: list[Hooks] = []  # of the step that runs

    def run(inner: Callable[..., Any], *args: Any) -> Any:
        with current[-1].around():  # the checkpoint's own hooks are inside: only inputs meet these
            return checkpoint(inner, *args, use_reentrant=False)

    for block in case.blocks(model):
        block.forward = functools.partial(run, block.forward)  # type: ignore[method-assign]

    def forward() -> Tensor:
        current[:] = [Hooks(PLACES[setting](), model)]
        return model(*case.sample)

    return forward
