"""Devices: which are refused, by name, and what CUDA's object does where torch cannot help."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fake_cuda.allocator import AllocatorRules, CachingAllocator
from rkgb import UnsupportedDeviceError
from rkgb.device.chosen import device_of
from rkgb.device.cuda import Cuda, trace_by_counters
from rkgb.torch_api.kernel_choice import KernelChoice, RecomputingAs, switch_forward, with_flags

FIRST = torch.device("cuda", 0)


@pytest.mark.parametrize("name", ["mps", "xpu", "hpu", "meta", "privateuseone"])
def test_other_accelerators_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedDeviceError, match=f"'{name}'.*'cpu' and on NVIDIA's 'cuda'"):
        device_of(name)


def test_rocm_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(UnsupportedDeviceError, match="ROCm"):
        device_of(FIRST)


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_an_allocator_that_does_not_count_is_refused(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    device = Cuda(FIRST)
    with pytest.raises(UnsupportedDeviceError, match=f"'{backend}', does not count"):
        device.trace_memory(lambda _span: None)


def test_what_chooses_kernels_and_blocks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["", "expandable_segments:True"]
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    name = "_accelerator_getAllocatorSettings"
    monkeypatch.setattr(torch._C, name, lambda: said[-1], raising=False)
    before = Cuda(FIRST).environment
    assert before["cuDNN"] == "91002"
    assert before["allocator"] == "native expandable_segments:True"
    said.pop()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    now = Cuda(FIRST).environment
    assert {k for k in now if now[k] != before[k]} == {"allocator", "cuBLAS workspaces"}
    monkeypatch.delattr(torch._C, name)  # which torch 2.11 has not
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert Cuda(FIRST).environment["allocator"] == "native max_split_size_mb:64"


def test_random_numbers_within_a_captured_graph_are_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")

    device = Cuda(FIRST)
    generator = SimpleNamespace(clone_state=refuse)
    monkeypatch.setattr(torch.cuda, "get_rng_state", refuse)
    monkeypatch.setattr(torch.cuda, "set_rng_state", refuse)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    calls = (
        device.random_state,
        device.copied_generator,
        lambda: device.set_random_state(torch.empty(0)),
    )
    for capturing, expected in ((True, UnsupportedDeviceError), (False, RuntimeError)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        for call in calls:
            with pytest.raises(RuntimeError) as raised:
                call()
            assert isinstance(raised.value, expected) == capturing or not capturing
            assert ("captured as a CUDA graph" in str(raised.value)) == capturing


@pytest.mark.parametrize("expandable", [False, True])
def test_counters_tell_requests_and_blocks_apart(expandable: bool) -> None:
    """The meter of CUDA over a model of the allocator: spans by requests, the peak in both."""
    allocator = CachingAllocator(AllocatorRules(expandable=expandable))
    highest = [0, 0]

    def take(size: int) -> Any:
        block = allocator.take(size)
        highest[:] = map(max, highest, (allocator.asked, allocator.allocated))
        return block

    def counts() -> tuple[int, int, int, int]:
        return allocator.asked, highest[0], allocator.allocated, highest[1]

    def reset() -> None:
        highest[:] = [allocator.asked, allocator.allocated]

    resident = take(9 << 20)

    def run(span: Any) -> None:
        big = take(12 << 20)
        with span("first"):
            small = take(1000)
            other = take(100)
            allocator.give(other)
        allocator.give(big)
        with span("second"):
            allocator.give(small)
            # On a free block of 12 MiB, of which less than 1 MiB would be left.
            again = take((11 << 20) + (512 << 10))
        allocator.give(again)

    trace = trace_by_counters(run, counts, reset)
    first, second = trace.spans
    assert (first.start_bytes, first.added_peak_bytes) == (12 << 20, 1100)
    assert first.end_bytes == (12 << 20) + 1000
    assert second.peak_bytes == (11 << 20) + (512 << 10)
    assert trace.peak_bytes == (12 << 20) + 1100
    assert trace.end_bytes == 0
    assert trace.allocated_peak_bytes == (12 << 20) + 1024 + 512
    taken = allocator.take((11 << 20) + (512 << 10)).size
    assert taken == ((11 << 20) + (512 << 10) if expandable else 12 << 20)
    allocator.give(resident)


# ------------------------------------------------------------------------------- kernel choice


@contextlib.contextmanager
def as_it_was() -> Iterator[KernelChoice]:
    start = KernelChoice.now()
    try:
        yield start
    finally:
        start.make_current()
        assert KernelChoice.now() == start


def test_every_flag_is_put_back() -> None:
    with as_it_was() as start:
        flags = (
            ("sdp.flash", False),
            ("cudnn.benchmark", True),
            ("matmul.bf16_sums", False),
            ("mkldnn.enabled", False),
            ("deterministic", (True, True)),
        )
        with with_flags(flags):
            changed = KernelChoice.now()
            assert changed.flags_unlike(start) == flags
            assert torch.are_deterministic_algorithms_enabled()
        assert KernelChoice.now() == start


def test_forwards_that_run_again_choose_as_then_and_errors_put_flags_back() -> None:
    with as_it_was() as now:
        with with_flags((("mkldnn.enabled", False),)):
            then = KernelChoice.now()
        recomputing = RecomputingAs(then, now)
        recomputing.__enter__()
        seen = []
        for on in (True, False, True):
            switch_forward(on)
            seen.append(torch.backends.mkldnn.enabled)
        recomputing.__exit__(ZeroDivisionError, ZeroDivisionError(), None)  # within a forward
        assert seen == [False, True, False]
        assert torch.backends.mkldnn.enabled
