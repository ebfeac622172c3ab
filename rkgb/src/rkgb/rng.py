"""Save and restore the state of torch's default random generators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RngState:
    """State of the CPU generator and, where the graph runs on one, of a CUDA device's."""

    cpu: Tensor
    cuda: Tensor | None
    device: torch.device

    @classmethod
    def save(cls, device: torch.device) -> RngState:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda, device)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)

    def equals(self, other: RngState) -> bool:
        if not torch.equal(self.cpu, other.cpu):
            return False
        if self.cuda is None or other.cuda is None:
            return self.cuda is other.cuda
        return torch.equal(self.cuda, other.cuda)

    @property
    def size_bytes(self) -> int:
        """Bytes that this state holds in the memory that the budget is about."""
        return self.cpu.numel() if self.cuda is None else 0
