"""How much memory a call takes: CUDA allocator counters, or the profiler's events on the CPU.

On a CPU torch has no allocator statistics, and resident set size shows neither reuse nor small
tensors. The `[memory]` events of torch's profiler show every tensor and every kernel's workspace.
The public `torch.profiler.profile` is not used because it imports torch's whole compiler.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.autograd.profiler import profile, record_function

from rotor.runtime.device import device_of

T = TypeVar("T")
# Adam keeps two float32 values for each number of a parameter. It allocates them after the first
# step, when the limit has already been determined.
OPTIMIZER_BYTES_PER_NUMBER = 8
_LABEL = "rotor.runtime.memory:"


@dataclass(frozen=True, slots=True)
class Usage:
    """The change of the device's memory by a call, in bytes above the start."""

    peak_bytes: int
    kept_bytes: int  # when it returned; negative if it released some


class MemoryMeter:
    """Measures calls one by one; the results can be read once the `with` block has ended.

    Only one meter may be active: on the CPU it is a profiler session, and torch allows one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._usage: dict[str, Usage] = {}
        self._labels: list[str] = []
        self._profile: Any = None  # torch gives it no types
        self._collects = False

    def __enter__(self) -> MemoryMeter:
        # Garbage that is freed during a call would count as memory released by the call.
        self._collects = gc.isenabled()
        gc.disable()
        if not self._device.has_counters:
            # Keeps the profiler's library from writing to stderr at every start and stop.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            untyped: Any = profile
            self._profile = untyped(profile_memory=True, use_kineto=True)
            self._profile.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._collects:
            gc.enable()
        if self._profile is None:
            return
        self._profile.__exit__(kind, error, trace)
        if error is None:
            self._read_events(self._profile)
        self._profile = None

    def run(self, label: str, call: Callable[[], T]) -> T:
        """Return `call()`, measured under `label`."""
        if self._device.has_counters:
            return self._run_counted(label, call)
        name = f"{_LABEL}{len(self._labels)}"
        self._labels.append(label)
        with record_function(name):
            return call()

    def usage(self, label: str) -> Usage:
        """Return what the call of that label used."""
        return self._usage[label]

    def _run_counted(self, label: str, call: Callable[[], T]) -> T:
        self._device.reset_peak()
        before = self._device.counts().now_bytes
        result = call()
        after = self._device.counts()
        self._usage[label] = Usage(after.peak_bytes - before, after.now_bytes - before)
        return result

    def _read_events(self, recorded: Any) -> None:
        changes: list[tuple[int, int]] = []
        spans: dict[int, tuple[int, int]] = {}
        events: Iterable[Any] = recorded.kineto_results.events()
        for event in events:
            name = event.name()
            if name == "[memory]":
                size = event.nbytes()
                blocks = self._device.block_bytes(abs(size))
                changes.append((event.start_ns(), blocks if size > 0 else -blocks))
            elif name.startswith(_LABEL):
                start = event.start_ns()
                spans[int(name.removeprefix(_LABEL))] = (start, start + event.duration_ns())
        changes.sort(key=lambda change: change[0])
        position = 0
        for index, label in enumerate(self._labels):
            start, end = spans[index]
            while position < len(changes) and changes[position][0] < start:
                position += 1
            held = peak = 0
            while position < len(changes) and changes[position][0] <= end:
                held += changes[position][1]
                peak = max(peak, held)
                position += 1
            self._usage[label] = Usage(peak, held)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages behind the tensors."""
    sizes = {t.untyped_storage().data_ptr() or id(t): t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())


def share_storage(first: Iterable[torch.Tensor], second: Iterable[torch.Tensor]) -> bool:
    """Return whether a tensor of the first shares its storage with one of the second."""
    pointers = {t.untyped_storage().data_ptr() for t in first if t.untyped_storage().nbytes()}
    return any(
        t.untyped_storage().nbytes() and t.untyped_storage().data_ptr() in pointers for t in second
    )
