"""One object for everything that differs between devices, chosen only here.

    device = device_of(tensor.device)
    device.block_bytes(1000)        # 1024 on CUDA, 1000 on a CPU
    device.trace_memory(run)        # by the allocator's counters, or by the profiler's events
    device.time(call)               # the time of the kernels, and of launching them

`standing_in` lets another object answer for a device: `FakeCuda` applies CUDA's rules on a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from rkgb.device.base import Device, MemoryTrace, Span, no_collection
from rkgb.device.cpu import Cpu
from rkgb.device.cuda import Cuda
from rkgb.errors import UnsupportedDeviceError
from rkgb.torch_api.private_names import ON_CUDA, refuse_missing

_standing_in: list[Device] = []


def device_of(where: torch.device | str) -> Device:
    """Return the object that answers for a device.

    Raises:
        UnsupportedDeviceError: its memory cannot be counted, or its random numbers not repeated.
    """
    where = torch.device(where)
    for device in reversed(_standing_in):
        if device.where.type == where.type:
            return device
    if where.type == "cpu":
        return Cpu(where)
    if where.type == "cuda" and torch.version.hip is None:
        if torch.backends.cuda.is_built():
            refuse_missing(ON_CUDA, "on CUDA")
        return Cuda(where)
    named = f"'{where}' (ROCm)" if where.type == "cuda" else f"'{where}'"
    raise UnsupportedDeviceError(
        f"a module or sample on {named} was given, and rkgb knows how to count memory, repeat "
        "random numbers and run kernels again on 'cpu' and on NVIDIA's 'cuda' only. Move both to "
        "one of these: model.to('cpu')."
    )


def trace_memory(run: Callable[[Span], object], device: torch.device) -> MemoryTrace:
    """Call `run(span)` and return its memory; `span(name)` is a context manager for parts of it.

    Spans must not overlap. The result of `run` is dropped after the measurement. Meanwhile Python
    collects no garbage: what it frees at some moment would count as freed by the step.
    """
    with no_collection():
        return device_of(device).trace_memory(run)


@contextlib.contextmanager
def standing_in(device: Device) -> Iterator[Device]:
    """While active, `device` answers for all devices of its type."""
    _standing_in.append(device)
    try:
        yield device
    finally:
        _standing_in.remove(device)
