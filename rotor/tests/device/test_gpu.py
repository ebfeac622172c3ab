"""On a CUDA device: the limit bounds what the allocator's counter says."""

import copy

import pytest
import torch

import rotor
from oracles.checkpointables import assert_trains_like
from rotor import Checkpointable
from zoo.chains import residual_net

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.fixture(autouse=True)
def _deterministic_convolutions():
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


def step(module, x):
    module(x).square().mean().backward()


def peak_above_start(module, x):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(module, x)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_measured_peak_is_within_the_limit_and_results_are_equal():
    device = torch.device("cuda")
    twin = residual_net(8, 32).to(device)
    x = torch.randn(32, 3, 64, 64, device=device)
    step(copy.deepcopy(twin), x)  # libraries allocate their workspace at their first use
    chk = Checkpointable(copy.deepcopy(twin), x)
    chk.compute_sequence(10**12)
    plain = chk.get_expected_memory()
    with pytest.raises(rotor.InfeasibleBudgetError) as caught:
        chk.compute_sequence(1)
    limit = (plain + caught.value.minimum_bytes) // 2
    chk.compute_sequence(limit)
    assert chk.schedule.forward_count > len(chk.chain)
    step(chk, x)
    chk.zero_grad(set_to_none=False)
    assert peak_above_start(chk, x) <= limit
    assert_trains_like(
        Checkpointable(copy.deepcopy(twin), x, limit), twin, [x, torch.randn_like(x)]
    )


def test_the_limit_is_what_is_free_when_none_is_given():
    device = torch.device("cuda")
    chk = Checkpointable(residual_net(3, 8).to(device))
    step(chk, torch.randn(4, 3, 16, 16, device=device))
    free, total = torch.cuda.mem_get_info()
    assert chk.schedule.method == "no recomputation"
    assert chk.get_expected_memory() < free < total
