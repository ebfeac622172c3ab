"""The CPU: no allocator counters, no blocks, and synchronous calls.

Its allocator reports every allocation to torch's profiler, also the workspace of kernels; no other
cheap source does. The public `torch.profiler.profile` is not used: it reads inductor's settings and
so imports the whole compiler, which takes most of a second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from rkgb.device.base import CallTime, Change, Device, Mark, MemoryTrace, Span, SpanMemory, replay
from rkgb.torch_api.private.autograd import current_backward
from rkgb.torch_api.private.memory import memory_profile, profiler_is_on


class Cpu(Device):
    """The CPU of this machine."""

    is_asynchronous = _counts_own_time = False
    # Read once: reading it allocates counted memory.
    random_state_bytes = torch.get_rng_state().numel()

    @property
    def name(self) -> str:
        return str(self.where)

    def block_bytes(self, size_bytes: int) -> int:
        return size_bytes

    def trace_memory(self, run: Callable[[Span], object]) -> MemoryTrace:
        if current_backward() >= 0 and profiler_is_on():
            return _unmetered(run)
        return trace_by_profiler(run)

    def time(self, call: Callable[[], object]) -> CallTime:
        began, own_began = time.perf_counter(), time.thread_time()
        call()
        took_ms = (time.perf_counter() - began) * 1e3
        own_ms = (time.thread_time() - own_began) * 1e3
        if self._counts_own_time:
            return CallTime(own_ms, own_ms)
        return CallTime(took_ms, took_ms, max(0.0, took_ms - own_ms))

    @contextlib.contextmanager
    def counting_own_time(self) -> Iterator[None]:
        # With several threads, the timed one would spin while it waits for those without a core.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._counts_own_time = True
        try:
            yield
        finally:
            self._counts_own_time = False
            torch.set_num_threads(threads)

    def random_state(self) -> Tensor | None:
        return None

    def set_random_state(self, state: Tensor) -> None:
        raise AssertionError("the CPU's generator is torch's default one")


_log = logging.getLogger("rkgb")
PREFIX = "rkgb::"
_meters = 0  # number of running ones

# Keeps the profiler's library from printing a line at every start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def profiled(run: Callable[[Span], object], *, operations: bool = False) -> Any:
    """Call `run(span)` and return the profiler's events of it: memory, spans, `operations`."""
    from torch.autograd.profiler import record_function

    def span(name: str) -> AbstractContextManager[None]:
        return record_function(PREFIX + name)

    global _meters
    if is_profiled_by_user():
        _log.warning(
            "memory is metered by torch's profiler, which is on already: what it has seen so far "
            "is lost. Let every kind of call be planned before you profile"
        )
    with memory_profile(operations=operations) as results:
        _meters += 1
        try:
            result = run(span)
        finally:
            _meters -= 1
    del result
    return results()


def _unmetered(run: Callable[[Span], object]) -> MemoryTrace:
    """Call `run(span)` in a backward that is profiled: ending that profile there is not safe.

    Torch would go on to call what it has freed, and tell of each later event twice.
    """
    _log.warning(
        "memory cannot be metered in a backward that torch's profiler watches: parts that run "
        "whole are taken to need no workspace. Run such a step once before the profile begins"
    )
    names: list[str] = []

    def span(name: str) -> AbstractContextManager[None]:
        names.append(name)
        return contextlib.nullcontext()

    run(span)
    spans = tuple(SpanMemory(name, 0, 0, 0, 0) for name in names)
    return MemoryTrace(0, 0, spans, (), 0, is_metered=False)


def is_profiled_by_user() -> bool:
    """Return whether a profiler other than this meter is active."""
    return profiler_is_on() and not _meters


def trace_by_profiler(run: Callable[[Span], object]) -> MemoryTrace:
    """Call `run(span)` and return its memory, without what it frees of what was there before.

    Torch knows the size of a block only if a profiler ran when it was allocated, and does not
    forget it if the block is freed while none runs. So it reports some of the older blocks, at
    times with the size of an even older block at the same address.
    """
    changes: list[tuple[int, int, int]] = []  # (moment, address, bytes)
    marks: list[Mark] = []
    todo = [*reversed(profiled(run).experimental_event_tree())]
    while todo:
        event = todo.pop()
        todo += reversed(event.children)
        fields = event.extra_fields
        if event.tag.name == "Allocation":
            if fields.device.type == "cpu":
                changes.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name.startswith(PREFIX):
            name = event.name.removeprefix(PREFIX)
            marks.append((event.start_time_ns, event.end_time_ns, name))
    changes.sort(key=lambda change: change[0])
    marks.sort()
    own: set[int] = set()  # addresses of blocks that the run has allocated and not freed
    counted: list[Change] = []
    for moment, address, size in changes:
        if size > 0:
            own.add(address)
        elif address in own:
            own.remove(address)
        else:
            continue
        counted.append((moment, size))
    return replay(counted, marks)
