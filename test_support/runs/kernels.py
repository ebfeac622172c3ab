"""Other kernels for the same operations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """As `torch.backends.mkldnn.flags`, which warns about GPUs that are not there."""
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)
