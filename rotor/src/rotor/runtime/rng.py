"""Random generator state, of the CPU and of the CUDA devices in use, kept and put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RngState:
    """The state of the CPU generator and of some CUDA generators at one moment."""

    cpu: torch.Tensor
    cuda: tuple[tuple[torch.device, torch.Tensor], ...]

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> RngState:
        """Return the present state; only CUDA devices of `devices` are looked at."""
        cuda = tuple((d, torch.cuda.get_rng_state(d)) for d in devices if d.type == "cuda")
        return cls(torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Make this the present state."""
        torch.set_rng_state(self.cpu)
        for device, state in self.cuda:
            torch.cuda.set_rng_state(state, device)

    def same_as(self, other: RngState) -> bool:
        """Return whether no random number was drawn between the two."""
        return torch.equal(self.cpu, other.cpu) and all(
            torch.equal(mine, theirs)
            for (_, mine), (_, theirs) in zip(self.cuda, other.cuda, strict=True)
        )


@contextmanager
def preserved_rng(devices: Iterable[torch.device]) -> Iterator[RngState]:
    """Give the state at entry, and put it back at exit."""
    state = RngState.now(devices)
    try:
        yield state
    finally:
        state.restore()
