"""Memory of the device and of storages, and the profiler that meters it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


def profiler_is_on() -> bool:
    """Return whether a profiler is active in this thread."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


@contextlib.contextmanager
def memory_profile(*, operations: bool) -> Iterator[Callable[[], Any]]:
    """Profile the allocator; afterwards the yielded function returns the profiler's raw results.

    Without `operations` only memory and named spans are recorded, because recording small
    operations takes a fifth of their time. There is only one profiler: if it was on, it restarts
    afterwards.
    """
    from torch._C._profiler import RecordScope
    from torch.autograd import profiler

    untyped: Any = profiler
    was_on = profiler_is_on()
    session = untyped.profile(profile_memory=True, use_kineto=True)
    activities = session.kineto_activities
    untyped._prepare_profiler(session.config(create_trace_id=True), activities)
    scopes = set() if operations else {RecordScope.USER_SCOPE}
    untyped._enable_profiler(session.config(), activities, scopes)
    found: list[Any] = []
    try:
        yield lambda: found[0]
    finally:
        found.append(untyped._disable_profiler())
        if was_on:  # its owner will stop it
            untyped._prepare_profiler(session.config(create_trace_id=True), activities)
            untyped._enable_profiler(session.config(), activities)


def weak_storage(storage: Any) -> Any:
    """Return a weak reference to a storage; `expired()` tells whether it has been freed."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(storage)


def any_is_freed(storages: Iterable[Any]) -> Callable[[], bool]:
    """Return a function that tells whether one of these storages has been freed since."""
    references = [*map(weak_storage, storages)]
    expired = torch.UntypedStorage._expired
    numbers = [reference.cdata for reference in references]
    # The references count as long as they live: until then a number stands for no other storage.
    return lambda: len(references) > 0 and any(map(expired, numbers))


def allocator_settings() -> str:
    """Return the settings of the device's allocator as text: `expandable_segments:True`."""
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if ask is None:  # in torch 2.11; there they count as the environment gives them
        return os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return str(ask())


def current_cuda_stream(index: int) -> int:
    """Return a number of the current stream of a device, without the object that torch makes."""
    return int(torch._C._cuda_getCurrentRawStream(index))


def keep_cuda_busy(cycles: int) -> None:
    """Make the current CUDA stream wait, so that the host runs ahead of it."""
    torch.cuda._sleep(cycles)
