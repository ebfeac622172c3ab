"""Sections that need no plan: versions, the allocator, times of kernels, eager against eager."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)
from torch.nn.attention import SDPBackend, sdpa_kernel

import rockmate
from probe.machine import Machine, Row, apart
from rkgb.copies import copies_for, measured_link
from rkgb.engine import device_of


def versions(machine: Machine) -> Iterator[Row]:
    """What is installed, which attention is chosen, and whether a plan can be made at all."""
    row: Row = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device_of(machine.device).name,
        "allocator_settings": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
    }
    if machine.is_cuda:
        row |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "allocator": torch.cuda.get_allocator_backend(),
            "memory_bytes": torch.cuda.get_device_properties(machine.device).total_memory,
        }
    yield row
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(2, 4, 64, 64, device=machine.device, dtype=dtype, requires_grad=True)
        for masked in (False, True):
            mask = torch.ones(64, 64, device=machine.device, dtype=torch.bool) if masked else None
            made = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            yield {"attention": type(made.grad_fn).__name__, "dtype": str(dtype), "masked": masked}
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    module = rockmate.Rockmate(model, torch.randn(32, 64), 1.0)
    yield {"plan_on_cpu_bytes": module.plan.peak_bytes}


class _Within(torch.autograd.Function):
    """Runs a call in its backward: in the thread that runs backwards."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, call: Callable[[], Any]) -> torch.Tensor:
        ctx.call = call
        return start.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.call()
        return grad, None


def allocator(machine: Machine) -> Iterator[Row]:
    """What libraries keep in each thread, and what tensors of some sizes take beyond their own."""
    if not machine.is_cuda:
        yield {"skipped": "a CPU has no counters"}
        return
    matrix = torch.ones(256, 256, device=machine.device)

    def multiply() -> None:
        torch.mm(matrix, matrix)

    def in_a_backward() -> None:
        start = torch.ones((), device=machine.device, requires_grad=True)
        _Within.apply(start, multiply).backward()

    def elsewhere() -> None:
        with torch.cuda.stream(torch.cuda.Stream(machine.device)):
            multiply()

    before = machine.counters()
    for name, call in (
        ("main thread", multiply),
        ("autograd thread", in_a_backward),
        ("side stream", elsewhere),
    ):
        call()
        now = machine.counters()
        yield {"kept_by": name, **{key: now[key] - before[key] for key in now}}
        before = now
    freed = torch.empty(12 << 20, dtype=torch.uint8, device=machine.device)
    del freed
    for mib in (1.5, 11.5, 21.3):
        before = machine.counters()
        tensor = torch.empty(int(mib * 2**20), dtype=torch.uint8, device=machine.device)
        now = machine.counters()
        yield {"tensor_mib": mib, **{key: now[key] - before[key] for key in now}}
        del tensor


def times(machine: Machine) -> Iterator[Row]:
    """Kernels alone and with their launch; what random states cost; whether masks repeat."""
    rows, width = (8, 64) if machine.tiny else (8192, 768)
    x = torch.randn(rows, width, device=machine.device)
    weight = torch.randn(width, width, device=machine.device)
    calls: dict[str, Callable[[], Any]] = {
        "add one element": lambda one=x[0, :1]: one.add_(0),  # type: ignore[misc]
        "layer norm": lambda: F.layer_norm(x, (width,)),
        "linear": lambda: F.linear(x, weight),
        "dropout": lambda: F.dropout(x, 0.1),
    }
    device = device_of(machine.device)
    for name, call in calls.items():
        call()
        on_device, host = machine.milliseconds(call, 5)
        row = {"call": name, "device_ms": on_device, "host_ms": host}
        if machine.is_cuda:
            row["idle_ms"] = _on_an_idle_device(call, machine.device)
        yield row
    state = device.random_state()
    first = F.dropout(x, 0.5)
    if state is not None:
        device.set_random_state(state)
        yield {"dropout_repeats": bool(torch.equal(first, F.dropout(x, 0.5)))}


def link(machine: Machine) -> Iterator[Row]:
    """How fast storages move to memory of the host and back while kernels run, three times."""
    for _ in range(3):
        yield measured_link(copies_for(machine.device), machine.device)._asdict()


def _on_an_idle_device(call: Callable[[], Any], where: torch.device) -> float:
    """Return what events around a call say where the device waits for it."""
    torch.cuda.synchronize(where)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


_ATTENTION = {
    "default": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def eager_noise(machine: Machine) -> Iterator[Row]:
    """Three plain steps from one random state: how many gradients differ, and by how much."""
    backends = ["default", "math"] if not machine.is_cuda else list(_ATTENTION)
    kinds = [("gpt2", kind, b) for kind in ("bf16", "amp", "fp32") for b in backends]
    if machine.tiny:
        kinds = kinds[:1]
    for name, kind, backend in kinds:
        chosen = _ATTENTION[backend]
        with sdpa_kernel(chosen) if chosen is not None else contextlib.nullcontext():
            yield from _noise(machine, name, kind, attention=backend)
    for name, kind, last in (("resnet50", "fp32", False), ("resnet50", "amp", True)):
        for benchmark in (False, True):
            with torch.backends.cudnn.flags(benchmark=benchmark):
                yield from _noise(machine, name, kind, last, benchmark=benchmark)
    yield from _noise(machine, "unet", "fp32")
    yield from _noise(machine, "lstm", "fp32")


def _noise(
    machine: Machine, name: str, kind: str, channels_last: bool = False, **said: Any
) -> Iterator[Row]:
    row = {"network": name, "kind": kind, **said}
    try:
        ready = machine.network(name, kind, channels_last=channels_last)
        ready.gradients()  # libraries choose
        first, second, third = (ready.gradients() for _ in range(3))
        one, other = apart(first, second), apart(second, third)
        worst = max(one["worst"], other["worst"])
        count = max(one["differing"], other["differing"])
        yield {**row, **one, "differing": count, "worst": worst}
    except RuntimeError as error:  # a kernel that does not take these shapes
        yield {**row, "error": _first_line(error)}


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
