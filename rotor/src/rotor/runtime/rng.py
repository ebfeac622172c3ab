"""Save and restore the random state of the CPU and of the devices in use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rotor.runtime.device import device_of


@dataclass(frozen=True, slots=True)
class RngState:
    """The state of the CPU's generator and of some devices' generators at one moment."""

    cpu: torch.Tensor
    own: tuple[tuple[torch.device, torch.Tensor], ...]

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> RngState:
        """Return the present state of the CPU and of the `devices` that have a generator."""
        states = ((d, device_of(d).random_state()) for d in devices)
        return cls(torch.get_rng_state(), tuple((d, s) for d, s in states if s is not None))

    def restore(self) -> None:
        """Make this the present state."""
        torch.set_rng_state(self.cpu)
        for device, state in self.own:
            device_of(device).set_random_state(state)

    def same_as(self, other: RngState) -> bool:
        """Return whether no random number was drawn between the two."""
        return torch.equal(self.cpu, other.cpu) and all(
            torch.equal(mine, theirs)
            for (_, mine), (_, theirs) in zip(self.own, other.own, strict=True)
        )


@contextmanager
def preserved_rng(devices: Iterable[torch.device]) -> Iterator[RngState]:
    """Yield the state at entry and restore it at exit."""
    state = RngState.now(devices)
    try:
        yield state
    finally:
        state.restore()
