"""Copies by two queues of a device, to memory of the host that the device reaches by itself.

The host never waits: events order the queues. The memory of a storage is freed behind a wait in the
queue that computes, to which its allocator gives it back. So it is used again behind the copy only,
and nothing has to be told to the allocator (`record_stream`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rkgb.copies.disk import Disk
from rkgb.copies.moved import Arena, Block, Copies
from rkgb.copies.workers import Host, HostBlock, no_room
from rkgb.device.chosen import device_of
from rkgb.device.queues import CopyQueues, Queue
from rkgb.errors import UnsupportedDeviceError


class PinnedBlock(HostBlock):
    """Pages of the host that a device reaches: as many as are asked for, and no more."""

    def __init__(self, size_bytes: int, queues: CopyQueues, both: tuple[Queue, Queue]) -> None:
        self._queues, self._both, self._is_pinned = queues, both, False
        self._process = os.getpid()
        super().__init__(size_bytes)
        self.last_back: Any = None  # the mark behind the latest copy from here
        try:
            queues.pin(self.address, size_bytes)
        except RuntimeError as error:
            raise no_room(f"asked to pin {size_bytes} bytes", error) from error
        self._is_pinned = True
        self.bytes = torch.frombuffer(self.pages, dtype=torch.uint8)

    def __del__(self) -> None:
        # A process that was forked from this one has neither the device nor those pages pinned.
        is_ours = self._is_pinned and self._process == os.getpid()
        if is_ours and not sys.is_finalizing():
            for queue in self._both:  # copies of a step that was broken off may still run
                queue.synchronize()
            self._queues.unpin(self.address)


class Queued:
    """A copy in a queue."""

    __slots__ = ("_computing", "_done", "_queues")

    def __init__(self, queues: CopyQueues, computing: Queue, done: Any) -> None:
        self._queues, self._computing, self._done = queues, computing, done

    def join(self) -> None:
        now = self._queues.current()
        now.wait_event(self._done)
        if now != self._computing:  # to which the memory is given back
            self.abandon()

    def is_done(self) -> bool:
        return self._queues.is_done(self._done)

    def abandon(self) -> None:
        self._computing.wait_event(self._done)


class Pinned(Copies):
    """Copies to pinned memory of the host, beside the computation of a device."""

    def __init__(self, queues: CopyQueues) -> None:
        super().__init__()
        self._queues = queues
        self._out, self._back = queues.new(), queues.new()

    def arena(self, size_bytes: int) -> Arena:
        if self._queues.is_captured():
            raise UnsupportedDeviceError(
                "a step that moves what it keeps to the host was captured as a CUDA graph, whose "
                "runs would share one place there. Capture a module that is planned without that."
            )
        return super().arena(size_bytes)

    def wait_for_kernels(self) -> None:
        self._queues.current().synchronize()

    def new_block(self, size_bytes: int) -> PinnedBlock:
        return PinnedBlock(size_bytes, self._queues, (self._out, self._back))

    def start_out(self, storage: torch.UntypedStorage, arena: Arena, offset: int) -> Queued:
        block = _pinned(arena.block)
        if block.last_back is not None:  # of a step that computed in another queue
            self._out.wait_event(block.last_back)
        there = block.bytes[offset : offset + storage.nbytes()]
        return self._start(self._out, there, _bytes_of(storage))

    def start_back(self, storage: torch.UntypedStorage, arena: Arena, offset: int) -> Queued:
        block = _pinned(arena.block)
        there = block.bytes[offset : offset + storage.nbytes()]
        queued = self._start(self._back, _bytes_of(storage), there)
        block.last_back = queued._done
        return queued

    def _start(self, queue: Queue, target: Tensor, source: Tensor) -> Queued:
        computing = self._queues.current()
        queue.wait_event(computing.record_event())
        self._queues.copy(queue, target, source)
        return Queued(self._queues, computing, queue.record_event())


def _pinned(block: Block) -> PinnedBlock:
    assert isinstance(block, PinnedBlock)
    return block


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def copies_for(where: torch.device, folder: str | Path | None = None) -> Copies:
    """Return what takes storages of a device: memory of its host, or files in a folder.

    Raises:
        CopyError: there is no such folder.
        UnsupportedDeviceError: files for a device that is not a CPU.
    """
    queues = device_of(where).copy_queues()
    if folder is None:
        return Host() if queues is None else Pinned(queues)
    if queues is not None:
        raise UnsupportedDeviceError(
            f"files in '{folder}' were asked for what leaves '{where}', and found that only memory "
            "of the host takes what leaves a GPU. Move to the host instead."
        )
    return Disk(folder)
