"""Where a test of CUDA runs: on a GPU, and under its rules on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fake_cuda.allocator import AllocatorRules
from fake_cuda.device import fake_cuda

NEEDS_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
)


@pytest.fixture(params=["fake", pytest.param("cuda", marks=NEEDS_GPU)])
def place(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Return the device of a test that runs in both places."""
    if request.param == "fake":
        with fake_cuda(AllocatorRules.shrunk(64)):
            yield torch.device("cpu")
    else:
        yield torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def gpu() -> torch.device:
    """Return the device of a test that needs a GPU."""
    return torch.device("cuda", torch.cuda.current_device())
