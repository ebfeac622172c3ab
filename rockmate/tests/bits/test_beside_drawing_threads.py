"""Other threads draw random numbers, or seed them, while a module is planned."""

import contextlib
import gc
import random
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from rkgb.device import no_collection
from rockmate import Rockmate
from rockmate.errors import SelfTestError


def _network():
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
    return nn.Sequential(*layers), torch.randn(16, 32)


@contextlib.contextmanager
def _beside(work):
    stop = threading.Event()

    def again():
        while not stop.is_set():
            work()
            time.sleep(0.0002)

    thread = threading.Thread(target=again, name="the drawing one")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


DRAWS = {
    "python": random.random,
    "python's seed": lambda: random.seed(1),
    "numpy": np.random.rand,
    "numpy's seed": lambda: np.random.seed(0),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_what_the_forward_cannot_have_drawn_is_not_its(draw):
    module, x = _network()
    with _beside(DRAWS[draw]):
        planned = Rockmate(module, x, "1MiB", cost="flops")
    assert planned.plan.opaque == ()


class Drawing(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * random.random()


def _plan_often(module, x):
    for _ in range(20):  # one may be planned while the other thread waits
        Rockmate(module, x, "1MiB", cost="flops")


def test_what_the_forward_draws_is_its_still():
    module, x = _network()
    drawing = nn.Sequential(Drawing(*module), *module)
    with _beside(random.random), pytest.raises(SelfTestError, match="numbers of Python"):
        _plan_often(drawing, x)


@pytest.mark.parametrize("draw", [lambda: torch.randn(3), lambda: torch.manual_seed(0)])
def test_who_draws_from_torchs_is_named(draw):
    module, x = _network()
    found = "another thread .*'the drawing one'.* draws random numbers of torch"
    with _beside(draw), pytest.raises(SelfTestError, match=found):
        _plan_often(module, x)


def test_the_search_for_cycles_is_on_again_whoever_ends_first():
    first, other = no_collection(), no_collection()
    assert gc.isenabled()
    with first:
        other.__enter__()
    assert not gc.isenabled()
    other.__exit__(None, None, None)
    assert gc.isenabled()
