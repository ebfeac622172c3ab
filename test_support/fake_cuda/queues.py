"""Streams and events of CUDA on a CPU, which computes at once and copies when it pleases.

A copy holds neither of its tensors, as on CUDA. It raises if one was freed before it began: there
another tensor would have been read or overwritten.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from rkgb.device.queues import CopyQueues, Queue


class _Computing:
    """The queue of kernels, which have run by the time that their call returns."""

    def record_event(self) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def wait_event(self, event: Future[Any]) -> None:
        event.result()

    def synchronize(self) -> None:
        return


class _Copying:
    """A queue whose work is done later, by a thread."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="fake copies")
        self.latest: Future[Any] = _Computing().record_event()

    def put(self, work: Callable[[], object]) -> None:
        before = self.latest

        def then() -> None:
            before.result()  # what failed before this fails again here
            work()

        self.latest = self.thread.submit(then)

    def record_event(self) -> Future[Any]:
        return self.latest

    def wait_event(self, event: Future[Any]) -> None:
        self.put(event.result)

    def synchronize(self) -> None:
        self.latest.result()


class FakeQueues(CopyQueues):
    """Those of the CPU as if it were CUDA; each copy begins `wait_s()` seconds late."""

    computing = _Computing()

    def __init__(self, wait_s: Callable[[], float] = float) -> None:
        self._wait_s = wait_s
        self.pinned: dict[int, int] = {}  # address -> bytes

    def current(self) -> Queue:
        return self.computing

    def new(self) -> Queue:
        return _Copying()

    def copy(self, queue: Queue, target: Tensor, source: Tensor) -> None:
        assert isinstance(queue, _Copying)
        count = target.nbytes
        assert count == source.nbytes
        ends = [_End(tensor) for tensor in (target, source)]

        def work() -> None:
            time.sleep(self._wait_s())
            to, come_from = (end.address() for end in ends)
            ctypes.memmove(to, come_from, count)

        queue.put(work)

    def is_done(self, event: Any) -> bool:
        return bool(event.done())

    def pin(self, address: int, size_bytes: int) -> None:
        self.pinned[address] = size_bytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def is_captured(self) -> bool:
        return False


class _End:
    """One end of a copy, by its address alone."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage = weakref.ref(storage)
        self._start, self._size_bytes = storage.data_ptr(), storage.nbytes()
        self._address = tensor.data_ptr()

    def address(self) -> int:
        storage = self._storage()
        if storage is None or (storage.data_ptr(), storage.nbytes()) != (
            self._start,
            self._size_bytes,
        ):
            raise AssertionError("freed before it was copied")
        return self._address
