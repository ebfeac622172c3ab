"""The rules of CUDA on a CPU: tensors stay where they are, and count as CUDA would count them.

    with fake_cuda() as device:
        rk = Rockmate(model, sample, 0.6)      # blocks of 512 bytes, a caching allocator, ...

What is emulated: rounding and splitting of blocks; a library's workspace that is taken at the first
product of matrices in a thread, and kept; times by events, that include the start of a kernel
where the device has nothing else to do; random state that takes no device memory; a backward that
runs in another thread than its forward; copies that run later than they are asked for.

    with fake_cuda(host=[torch.float64]):

Tensors of these types lie on the host beside the device: `x.double()` moves one there, `x.float()`
back. Torch itself then follows them as it follows tensors of two devices: what is computed from
them is of their type, and numbers without dimensions go with either.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from fake_cuda.allocator import AllocatorRules, CachingAllocator
from fake_cuda.queues import FakeQueues
from rkgb.device.base import CallTime, Device, Mark, MemoryTrace, Span, replay
from rkgb.device.chosen import standing_in
from rkgb.device.cpu import PREFIX, profiled
from rkgb.device.cuda import warm_up_threads
from rkgb.graphs.basic import ambient_autocast, autocast_as
from rkgb.torch_api.private.modes import DispatchMode, current_dispatch_modes
from rkgb.torch_api.private.tables import pytree

WORKSPACE_BYTES = 32 << 20  # of cuBLAS on a Hopper GPU
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_ENGINE = "autograd::engine::evaluate_function"
_HOST = "an operation of the host"


@dataclass
class _Seen:
    """What one run has done, in order."""

    changes: list[tuple[int, int, int]] = field(default_factory=list)  # (moment, address, bytes)
    products: list[tuple[int, str]] = field(default_factory=list)  # (moment, thread)
    marks: list[Mark] = field(default_factory=list)


class FakeCuda(Device):
    """Answers for the CPU as a CUDA device would."""

    is_asynchronous = True
    random_state_bytes = 0

    def __init__(
        self,
        rules: AllocatorRules | None = None,
        *,
        workspace_bytes: int = WORKSPACE_BYTES,
        launch_ms: float = 0.04,
        memory_bytes: int | None = None,
        cudnn: str = "91002",
        host: Collection[torch.dtype] = (),
    ) -> None:
        super().__init__(torch.device("cpu"))
        self.allocator = CachingAllocator(rules or AllocatorRules())
        self.workspace_bytes, self.launch_ms = workspace_bytes, launch_ms
        self.memory_bytes, self.cudnn = memory_bytes, cudnn
        self.host = frozenset(host)
        self.stream = 0  # a test says which is current
        self.warm_threads: set[str] = set()
        self.given_back = 0
        self.is_tracing = False
        self.queues = FakeQueues()

    @property
    def name(self) -> str:
        return "a CPU as if it were CUDA"

    @property
    def environment(self) -> dict[str, str]:
        return {"cuDNN": self.cudnn, "allocator": str(self.allocator.rules)}

    def holds(self, tensor: Tensor) -> bool:
        return tensor.dtype not in self.host

    def block_bytes(self, size_bytes: int) -> int:
        return self.allocator.rounded(size_bytes)

    # ------------------------------------------------------------------ memory

    def trace_memory(self, run: Callable[[Span], object]) -> MemoryTrace:
        self.is_tracing = True
        try:
            seen = _seen_in(profiled(self._telling_the_host(run), operations=True))
        finally:
            self.is_tracing = False
        return self._counted(seen)

    def _telling_the_host(self, run: Callable[[Span], object]) -> Callable[[Span], object]:
        """Let a run say of its operations which of them compute on the host."""
        if not self.host:
            return run

        def running(span: Span) -> object:
            with _OnHost(self.host):
                return run(span)

        return running

    def _counted(self, seen: _Seen) -> MemoryTrace:
        asked: list[tuple[int, int]] = []
        products = list(seen.products)
        live: dict[int, Any] = {}
        known_from = self.allocator.allocated
        peak = known_from
        outside = 0  # what was there before the run, and was freed in it
        for moment, address, size in seen.changes:
            while products and products[0][0] <= moment:
                at, thread = products.pop(0)
                if self._warms(thread):
                    self.allocator.take(self.workspace_bytes)
                    asked.append((at, self.workspace_bytes))
                    peak = max(peak, self.allocator.allocated - outside)
            asked.append((moment, size))
            if size > 0:
                live[address] = self.allocator.take(size)
            elif address in live:
                self.allocator.give(live.pop(address))
            else:
                outside += self.block_bytes(-size)
            peak = max(peak, self.allocator.allocated - outside)
        for moment, thread in products:
            if self._warms(thread):
                self.allocator.take(self.workspace_bytes)
                asked.append((moment, self.workspace_bytes))
        for block in live.values():  # its end is not seen: the next run starts without it
            self.allocator.give(block)
        return replace(replay(asked, seen.marks), allocated_peak_bytes=peak - known_from)

    def _warms(self, thread: str) -> bool:
        if thread in self.warm_threads:
            return False
        self.warm_threads.add(thread)
        return True

    def warm_up(self) -> None:
        self.trace_memory(lambda _span: warm_up_threads(self.where))

    def free_bytes(self) -> int | None:
        return self.memory_bytes

    def give_back(self) -> None:
        self.given_back += 1
        self.allocator.empty_cache()

    def current_stream(self) -> int:
        return self.stream

    def copy_queues(self) -> FakeQueues:
        return self.queues

    # ------------------------------------------------------------------ time, random numbers

    def time(self, call: Callable[[], object]) -> CallTime:
        # As Cuda.time: the device is busy when the call starts, so that only kernels count.
        began = time.perf_counter()
        call()
        return CallTime((time.perf_counter() - began) * 1e3, self.launch_ms)

    def random_state(self) -> Tensor | None:
        return None

    def set_random_state(self, state: Tensor) -> None:
        raise AssertionError("none was given")


class _OnHost(DispatchMode):
    """Puts the operations that make tensors of the host's types in spans of their own."""

    only_watches = True

    def __init__(self, types: Collection[torch.dtype]) -> None:
        super().__init__()
        self._types = types

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        given = [t for t in given if t.dim()] or given  # numbers go with either
        like = given[0].dtype if given else torch.get_default_dtype()
        asked = (kwargs or {}).get("dtype") or like
        with record_function(_HOST) if asked in self._types else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))


def _seen_in(results: Any) -> _Seen:
    """Read a run off the profiler's tree of events.

    Random states lie on the host beside CUDA, and are known here by their odd size.
    """
    host_bytes = torch.get_rng_state().numel()
    seen = _Seen()
    on_host: set[int] = set()  # addresses
    todo = [(event, False, False) for event in reversed(results.experimental_event_tree())]
    while todo:
        event, in_backward, is_host = todo.pop()
        if event.tag.name == "Allocation":
            fields = event.extra_fields
            if abs(fields.alloc_size) == host_bytes:
                continue
            if is_host and fields.alloc_size > 0:
                on_host.add(fields.ptr)
            if fields.ptr in on_host:
                if fields.alloc_size < 0:
                    on_host.remove(fields.ptr)
                continue
            seen.changes.append((event.start_time_ns, fields.ptr, fields.alloc_size))
            continue
        name = event.name
        in_backward, is_host = in_backward or name.startswith(_ENGINE), is_host or name == _HOST
        if name in _PRODUCTS:
            seen.products.append((event.start_time_ns, "autograd" if in_backward else "main"))
        elif name.startswith(PREFIX):
            mark = (event.start_time_ns, event.end_time_ns, name.removeprefix(PREFIX))
            seen.marks.append(mark)
        todo.extend((child, in_backward, is_host) for child in reversed(event.children))
    # Two changes at one moment keep the order of the tree, which is that of the program.
    seen.changes.sort(key=lambda change: change[0])
    seen.products.sort()
    seen.marks.sort()
    return seen


@contextlib.contextmanager
def fake_cuda(
    rules: AllocatorRules | None = None, *, own_thread: bool = True, **options: Any
) -> Iterator[FakeCuda]:
    """While active, the CPU counts as a CUDA device; with `own_thread`, backwards have their own.

    Not while memory is traced or operations are watched: torch does both per thread on a CPU.
    """
    device = FakeCuda(rules, **options)
    with standing_in(device), contextlib.ExitStack() as stack:
        if own_thread:
            stack.enter_context(_backward_in_a_thread(device))
        yield device


@contextlib.contextmanager
def _backward_in_a_thread(device: FakeCuda) -> Iterator[None]:
    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    with ThreadPoolExecutor(1, thread_name_prefix="fake autograd") as pool:

        def run(*args: Any, **kwargs: Any) -> Any:
            within = threading.current_thread().name.startswith("fake autograd")
            if within or device.is_tracing or current_dispatch_modes():
                return engine(*args, **kwargs)
            region, grad_mode = ambient_autocast(), torch.is_grad_enabled()

            def there() -> Any:  # torch takes these along to its threads
                with autocast_as(region), torch.set_grad_enabled(grad_mode):
                    return engine(*args, **kwargs)

            return pool.submit(there).result()

        torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.autograd._engine_run_backward = engine  # type: ignore[attr-defined]
