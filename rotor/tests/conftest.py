"""One thread for every test: results of some kernels depend on their number."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed_and_one_thread():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
