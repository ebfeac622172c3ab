"""A forward that leaves torch set otherwise than it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rkgb.errors import NoStepError
from rkgb.torch_api import Modes
from rkgb.torch_api.private.flags import sdpa_priority_order, set_sdpa_priority_order
from rockmate import Rockmate


class Net(nn.Module):
    def __init__(self, sets: Callable[[], object], *, branches: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.sets = nn.Linear(8, 8), nn.Linear(8, 4), sets
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.branches and x.sum() > 1e6:  # so that it runs whole
            x = 2 * x
        self.sets()
        return self.second(x)  # type: ignore[no-any-return]


def _set_benchmark() -> None:
    # As `torch.backends.cudnn.benchmark = ...`, which some tests of torch forbid for good.
    torch._C._set_cudnn_benchmark(not torch._C._get_cudnn_benchmark())


LEAVES: dict[str, tuple[Callable[[], object], Callable[[], Any]]] = {
    "algorithms": (
        lambda: torch.use_deterministic_algorithms(True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "a flag": (_set_benchmark, lambda: torch.backends.cudnn.benchmark),
    "attention": (
        lambda: torch.backends.cuda.enable_math_sdp(False),
        torch.backends.cuda.math_sdp_enabled,
    ),
    "precision": (
        lambda: torch.set_float32_matmul_precision("high"),
        torch.get_float32_matmul_precision,
    ),
    "threads": (lambda: torch.set_num_threads(3), torch.get_num_threads),
    "type of numbers": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "type of autocast": (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
    ),
    "prints": (lambda: torch.set_printoptions(precision=2), lambda: str(torch.ones(1) / 3)),
    "numpy's errors": (lambda: np.seterr(all="ignore"), np.geterr),
    "casts": (lambda: torch.set_autocast_cache_enabled(False), torch.is_autocast_cache_enabled),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    with Modes(), np.errstate():
        yield


@pytest.mark.parametrize("name", LEAVES)
def test_steps_leave_it_as_the_plain_forward_does(name: str) -> None:
    sets, read = LEAVES[name]
    torch.manual_seed(0)
    plain, sample = Net(sets), torch.randn(6, 8)
    model, before = copy.deepcopy(plain), read()
    planned = Rockmate(model, (sample,), 1.0, cost="flops", cache=False, progress=False)
    assert read() == before, "planning leaves it"
    found = []
    for own, module in ((planned, model), (plain, plain)):
        with Modes():
            for _ in range(2):
                result = own(sample)
                assert read() != before or name == "a flag"
                result.square().sum().backward()
            found.append([result.detach(), *(p.grad for p in module.parameters())])
    assert all(map(torch.equal, *found))


BY_HAND: dict[str, Callable[[], object]] = {
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "denormal numbers": lambda: torch.set_flush_denormal(False),
    "device": lambda: torch.set_default_device("cpu"),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_no_part_of_a_step_can_leave(name: str) -> None:
    with pytest.raises(NoStepError, match="for all that runs later"):
        Rockmate(Net(BY_HAND[name]), (torch.randn(6, 8),), 1.0, cost="flops", progress=False)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("branches", [False, True])
def test_gradients_that_stay_off(branches: bool) -> None:
    net = Net(lambda: torch.set_grad_enabled(False), branches=branches)
    with pytest.raises(NoStepError, match="whether gradients are computed"):
        Rockmate(net, (torch.randn(6, 8),), 1.0, cost="flops", progress=False)
    assert torch.is_grad_enabled()


def test_what_it_sets_for_a_part_of_itself_is_planned() -> None:
    def sets() -> None:
        with torch.autocast("cpu"), torch.device("cpu"), torch.no_grad():
            torch.ones(1)

    planned = Rockmate(Net(sets), (torch.randn(6, 8),), 1.0, cost="flops", progress=False)
    assert not planned.plan.opaque


def test_the_order_of_attentions_kernels_is_torchs() -> None:
    """The first attention of a process on CUDA sets it, and it stays."""
    order = sdpa_priority_order()
    other = (*order[1:], order[0])
    planned = Rockmate(
        Net(lambda: set_sdpa_priority_order(other)),
        (torch.randn(6, 8),),
        1.0,
        cost="flops",
        progress=False,
    )
    try:
        assert planned.plan.opaque == ()
        assert sdpa_priority_order() == other
    finally:
        set_sdpa_priority_order(order)
