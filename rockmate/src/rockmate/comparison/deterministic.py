"""Torch's deterministic algorithms for a while: where they run, bits can be demanded.

Many kernels of CUDA add with atomics, in whatever order threads arrive, so that two equal steps of
plain PyTorch differ in their last bits. Most have a slower variant that does not.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from rkgb.torch_api import with_flags

_FLAGS = (
    ("deterministic", (True, True)),  # what has no such variant warns and runs
    ("cudnn.deterministic", True),
    ("cudnn.benchmark", False),
)


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """While active, kernels that have a deterministic variant run it."""
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    with with_flags(_FLAGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        settings.fill_uninitialized_memory = False  # would be operations
        try:
            yield
        finally:
            settings.fill_uninitialized_memory = fills


def why_bits_may_differ() -> str:
    """Return what is set that makes equal kernels differ from thread to thread, or ''."""
    if not (torch.cuda.is_available() and torch.backends.cudnn.benchmark):
        return ""
    return (
        "torch.backends.cudnn.benchmark is on: cuDNN times its algorithms in each thread anew, and "
        "a backward, where forwards are run again, is another thread than the forward. Turn it "
        "off, or choose self_test=False"
    )
