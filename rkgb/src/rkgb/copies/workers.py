"""Copies by threads: one for each direction. To memory of the host, for what is on a CPU itself.

A worker copies bytes between addresses and calls nothing of torch's. So every allocation is made by
the thread that computes, in the order of its program.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from abc import abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from rkgb.copies.moved import Arena, Block, Copies
from rkgb.errors import CopyError


class HostBlock:
    """Pages of memory of the host.

    Raises:
        CopyError: there are not as many.
    """

    is_broken = False

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        try:  # a forked process has its own
            self.pages = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise no_room(f"asked for {size_bytes} bytes", error) from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))


def no_room(asked: str, error: Exception) -> CopyError:
    """Return the error of a host that has no memory for what leaves the device."""
    return CopyError(
        f"{asked} of the host's memory, where a step keeps what has left the device, and found: "
        f"{error}. Give less of the host's memory to it, or plan without it.",
        path="host",
    )


class Worked:
    """A copy by a worker."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def join(self) -> None:
        self._future.result()

    def is_done(self) -> bool:
        return self._future.done()

    def abandon(self) -> None:
        return  # the worker holds what it copies


class Workers(Copies):
    """Copies by two threads, which start when they are needed and end with this object."""

    def __init__(self) -> None:
        super().__init__()
        self._workers: dict[str, tuple[int, ThreadPoolExecutor]] = {}

    def start_out(self, storage: torch.UntypedStorage, arena: Arena, offset: int) -> Worked:
        return self._start("out", [storage, arena], offset)

    def start_back(self, storage: torch.UntypedStorage, arena: Arena, offset: int) -> Worked:
        return self._start("back", [storage, arena], offset)

    def _start(self, direction: str, held: list[object], offset: int) -> Worked:
        process, worker = self._workers.get(direction, (-1, None))
        if worker is None or process != os.getpid():  # threads do not follow into a forked process
            worker = ThreadPoolExecutor(1, thread_name_prefix=f"rkgb {direction}")
            self._workers[direction] = os.getpid(), worker
        return Worked(worker.submit(self._run, direction, held, offset))

    def _run(self, direction: str, held: list[object], offset: int) -> None:
        # Taken from the list, because the thread holds its arguments after the copy has ended.
        arena, storage = held.pop(), held.pop()
        assert isinstance(arena, Arena)
        assert isinstance(storage, torch.UntypedStorage)
        try:
            self.copy(direction, arena.block, offset, storage.data_ptr(), storage.nbytes())
        finally:
            del arena, storage

    @abstractmethod
    def copy(self, way: str, block: Block, offset: int, address: int, size_bytes: int) -> None:
        """Copy from an address out to a block, or back."""


class Host(Workers):
    """Copies to other memory of the host: for tests, and where nothing else is there."""

    def new_block(self, size_bytes: int) -> HostBlock:
        return HostBlock(size_bytes)

    def copy(self, way: str, block: Block, offset: int, address: int, size_bytes: int) -> None:
        assert isinstance(block, HostBlock)
        there = block.address + offset
        target, source = (there, address) if way == "out" else (address, there)
        ctypes.memmove(target, source, size_bytes)
