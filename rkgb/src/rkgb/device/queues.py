"""Queues of copies beside the computation: streams and events of CUDA."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch
from torch import Tensor


class Queue(Protocol):
    """Work that a device does in order: a stream of CUDA."""

    def record_event(self) -> Any:
        """Return a mark behind the work that is in the queue now."""

    def wait_event(self, event: Any) -> None:
        """Let later work wait for the mark of another queue; the host goes on."""

    def synchronize(self) -> None:
        """Let the host wait for the work that is in the queue now."""


class CopyQueues:
    """What a CUDA device offers to whoever copies beside the computation."""

    def __init__(self, where: torch.device) -> None:
        self._where = where

    def current(self) -> Queue:
        """Return the queue that kernels of this thread go to now."""
        return torch.cuda.current_stream(self._where)

    def new(self) -> Queue:
        """Return another queue."""
        return torch.cuda.Stream(self._where)

    def copy(self, queue: Queue, target: Tensor, source: Tensor) -> None:
        """Put a copy into a queue. Nobody holds the two tensors for it."""
        assert isinstance(queue, torch.cuda.Stream)
        with torch.cuda.stream(queue):
            target.copy_(source, non_blocking=True)

    def is_done(self, event: Any) -> bool:
        """Return whether what a mark stands behind has been done."""
        return bool(event.query())

    def pin(self, address: int, size_bytes: int) -> None:
        """Let the device reach these pages of the host.

        Raises:
            RuntimeError: they cannot be pinned.
        """
        with torch.cuda.device(self._where):  # or the first device would get a context, too
            code = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
            if code:  # CUDA says it once more at the next kernel, which has done nothing wrong
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self._where)
                torch.cuda.check_error(code)

    def unpin(self, address: int) -> None:
        """End what `pin` has begun."""
        with torch.cuda.device(self._where):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))

    def is_captured(self) -> bool:
        """Return whether work of this thread is recorded now, to be done again later."""
        return torch.cuda.is_current_stream_capturing()
