"""Measure memory as the allocator sees it, by named spans of a run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rkgb.device.chosen import device_of
from rkgb.device.trace import MemoryTrace, Span, SpanMemory

__all__ = ["MemoryTrace", "Span", "SpanMemory", "trace_memory"]


def trace_memory(run: Callable[[Span], object], device: torch.device) -> MemoryTrace:
    """Call `run(span)` and return its memory; `span(name)` is a context manager for parts of it.

    Spans must not overlap. The result of `run` is dropped after the measurement.
    """
    return device_of(device).trace_memory(run)
