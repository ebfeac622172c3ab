"""Save and restore the state of torch's default random generators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rkgb.device.chosen import device_of


@dataclass(frozen=True, slots=True)
class RngState:
    """The state of the CPU's generator and, if it has one, of the device's own."""

    cpu: Tensor
    own: Tensor | None
    device: torch.device

    @classmethod
    def save(cls, device: torch.device) -> RngState:
        return cls(torch.get_rng_state(), device_of(device).random_state(), device)

    @classmethod
    def of(cls, tensors: Iterator[Tensor], device: torch.device) -> RngState:
        """Return the state whose `tensors` come next."""
        cpu = next(tensors)
        return cls(cpu, None if device_of(device).random_state() is None else next(tensors), device)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.cpu] if self.own is None else [self.cpu, self.own]

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.own is not None:
            device_of(self.device).set_random_state(self.own)

    def equals(self, other: RngState) -> bool:
        if not torch.equal(self.cpu, other.cpu):
            return False
        if self.own is None or other.own is None:
            return self.own is other.own
        return torch.equal(self.own, other.own)

    @property
    def size_bytes(self) -> int:
        """Bytes of this state in the memory that the budget limits."""
        return device_of(self.device).random_state_bytes


@contextlib.contextmanager
def drawing_nothing(device: torch.device) -> Iterator[None]:
    """Restore the random state in the end, as if nothing had been drawn meanwhile."""
    state = RngState.save(device)
    try:
        yield
    finally:
        state.restore()


@dataclass(frozen=True, slots=True)
class KeptGenerators:
    """The same as copies of the generators, outside of tensor memory.

    Tensors would count as memory of the step that is measured.
    """

    cpu: torch.Generator
    own: torch.Generator | None
    device: torch.device

    @classmethod
    def keep(cls, device: torch.device) -> KeptGenerators:
        own = device_of(device).copied_generator()
        return cls(torch.default_generator.clone_state(), own, device)

    @property
    def state(self) -> RngState:
        own = None if self.own is None else self.own.get_state()
        return RngState(self.cpu.get_state(), own, self.device)

    def restore(self) -> None:
        self.state.restore()
