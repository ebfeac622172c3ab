"""One thread for every test: results of some kernels depend on their number."""

import functools

import pytest
import torch

from rotor import planning


@pytest.fixture(autouse=True)
def _seed_and_one_thread():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _little_search(monkeypatch):
    """Let the search for intervals end soon where schedules are run; schedules/ calls it itself."""
    little = functools.partial(planning.improve_with_intervals, effort=0.1)
    monkeypatch.setattr(planning, "improve_with_intervals", little)
