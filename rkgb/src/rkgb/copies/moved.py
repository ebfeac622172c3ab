"""What programs call: an arena for each step, and in it the storages that have moved there.

A storage is moved once, however many views it has. Its memory is freed by resizing it to nothing,
and comes back by resizing it, so views stay as they are. The program says in which order copies
begin and end, and nothing here decides anything.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from rkgb.elements.tensor_info import storage_of
from rkgb.errors import InvalidGraphError

PAGE_BYTES = 4096  # what is moved takes whole pages on the other side


def in_pages(size_bytes: int) -> int:
    """Return the bytes that a storage takes on the other side."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class Block(Protocol):
    """Memory on the other side, freed with its last owner."""

    size_bytes: int
    is_broken: bool  # no other step may use it


class Pending(Protocol):
    """A copy that has been started."""

    def join(self) -> None:
        """Let the computation wait for it; raise what has gone wrong."""

    def is_done(self) -> bool:
        """Return whether it has ended."""

    def abandon(self) -> None:
        """Say that nobody waits for it any more; memory of it may be used again afterwards."""


class Copies(ABC):
    """A place for storages, and copies to and from it beside the computation.

    The blocks of steps that have ended are kept for other steps. Several threads may use it. A
    larger block serves for a smaller one, but not where there is a limit for all of them.
    """

    is_limited = False

    def __init__(self) -> None:
        self._idle: deque[Block] = deque()
        self._process = os.getpid()

    def arena(self, size_bytes: int) -> Arena:
        """Return memory on the other side for one step."""
        if self._process != os.getpid():  # forked: those blocks are its parent's
            self._process, self._idle = os.getpid(), deque()
        others: list[Block] = []
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread has taken the last one
                block = self._idle.popleft()
                excess = block.size_bytes - size_bytes
                if excess == 0 or (excess > 0 and not self.is_limited):
                    self._idle.extend(others if self.is_limited else ())
                    return Arena(self, block)
                others.append(block)
                del block
        others.clear()  # freed before the next one is made, which serves for them, too
        return Arena(self, self.new_block(size_bytes))

    def return_block(self, block: Block) -> None:
        """Take back the block of an arena that nothing uses any more."""
        if not block.is_broken:
            self._idle.append(block)

    def let_go(self) -> None:
        """Free the blocks that no step uses now."""
        self._idle.clear()

    def wait_for_kernels(self) -> None:
        """Let the host wait for what the device computes, and not for copies."""
        return

    @abstractmethod
    def new_block(self, size_bytes: int) -> Block:
        """Allocate memory on the other side."""

    @abstractmethod
    def start_out(self, storage: torch.UntypedStorage, arena: Arena, offset: int) -> Pending:
        """Start copying a storage to the arena. The copy holds both until it has ended."""

    @abstractmethod
    def start_back(self, storage: torch.UntypedStorage, arena: Arena, offset: int) -> Pending:
        """Start filling a storage from the arena. The copy holds both until it has ended."""


class Arena:
    """A block, for the time of one step. It is returned once no move and no copy is left."""

    __slots__ = ("__weakref__", "block", "copies")

    def __init__(self, copies: Copies, block: Block) -> None:
        self.copies, self.block = copies, block

    def out(self, tensor: Tensor, offset: int, size_bytes: int) -> Moved:
        """Start copying the storage of a tensor to a place in the block."""
        storage = storage_of(tensor)
        if storage.nbytes() != size_bytes or not storage.resizable():
            raise InvalidGraphError(
                f"a plan moves a storage of {size_bytes} bytes that torch can free, and found one "
                f"of {storage.nbytes()} bytes{'' if storage.resizable() else ' that it cannot'}. "
                "Plan this module without moving what it keeps."
            )
        return Moved(self, storage, offset)

    def __del__(self) -> None:
        self.copies.return_block(self.block)


class Moved:
    """A storage that moves: to its place in an arena once, and from there as often as needed."""

    __slots__ = ("_arena", "_offset", "_pending", "_size_bytes", "_storage")

    def __init__(self, arena: Arena, storage: torch.UntypedStorage, offset: int) -> None:
        self._arena, self._storage, self._offset = arena, storage, offset
        self._size_bytes = storage.nbytes()
        self._pending: Pending | None = arena.copies.start_out(storage, arena, offset)

    def leave(self) -> None:
        """Free the storage's memory once it has been copied."""
        self.arrive()
        self._storage.resize_(0)

    def back(self) -> None:
        """Allocate the storage's memory again and start filling it."""
        self._storage.resize_(self._size_bytes)
        self._pending = self._arena.copies.start_back(self._storage, self._arena, self._offset)

    def arrive(self) -> None:
        """Let the computation wait for the latest copy."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.join()

    def __del__(self) -> None:
        if (pending := getattr(self, "_pending", None)) is not None:
            pending.abandon()
