"""Switches torch's deterministic algorithms on for a while, so that bits can be compared.

Many kernels of CUDA add with atomics, in the order in which threads arrive. So two equal steps of
plain PyTorch differ in their last bits. Most of these kernels have a slower deterministic variant.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from rkgb.torch_api import with_flags

_FLAGS = (
    ("deterministic", (True, True)),  # kernels without such a variant warn and run
    ("cudnn.deterministic", True),
    ("cudnn.benchmark", False),
)


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """While active, kernels with a deterministic variant use it."""
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    with with_flags(_FLAGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        settings.fill_uninitialized_memory = False  # would be operations
        try:
            yield
        finally:
            settings.fill_uninitialized_memory = fills


def searches_algorithms() -> bool:
    """Whether cuDNN times its algorithms in each thread anew, and may choose others in each.

    A backward, where forwards are run again, is another thread than the forward.
    """
    return bool(torch.backends.cudnn.benchmark)
