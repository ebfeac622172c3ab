"""The rules of CUDA on a CPU: blocks of 512 bytes, a limit that can be found out, warming up.

with fake_cuda(free_bytes=1 << 30):
    Checkpointable(net)      # finds its limit out as on a GPU
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from rotor.runtime.device import BLOCK_BYTES, USABLE_SHARE_OF_FREE, Cpu, standing_in


class FakeCuda(Cpu):
    """Answers for the CPU as a CUDA device would."""

    warms_up = True

    def __init__(self, free_bytes: int) -> None:
        super().__init__(torch.device("cpu"))
        self.free_bytes = free_bytes

    def block_bytes(self, size_bytes: int) -> int:
        return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def random_state_bytes(self) -> int:
        return self.block_bytes(super().random_state_bytes)

    def usable_bytes(self, coming_bytes: int) -> int | None:
        return int(USABLE_SHARE_OF_FREE * (self.free_bytes - coming_bytes))


@contextlib.contextmanager
def fake_cuda(free_bytes: int = 1 << 34) -> Iterator[FakeCuda]:
    """While active, the CPU counts as a CUDA device with so much memory free."""
    device = FakeCuda(free_bytes)
    with standing_in(device):
        yield device
