"""Shared by all tests: profiles of hypothesis, threads of parallel runs, torchvision on CPUs."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # set in the processes of `pytest -n 2`
    # They share the cores; each with all of them would be slower. Said before torch is there, it
    # holds in every thread, those of autograd for a device among them: a matrix product by two
    # threads may have other bits than by one.
    os.environ["OMP_NUM_THREADS"] = "1"

import torch
from hypothesis import settings

os.environ["ROCKMATE_CACHE"] = "off"  # no plan of another run, and none left to the user
# Processes that tests start find what only tests use, too.
_SUPPORT = str(Path(__file__).parent / "test_support")
os.environ["PYTHONPATH"] = os.pathsep.join(
    [_SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Examples are drawn anew at each run; CI draws the same ones every time; nightly draws many more.
# No test reads a clock: a busy machine is no failure.
settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=5000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def _declare_missing_operators() -> None:
    # torchvision's wheel registers these two only together with its compiled library, which a CPU
    # build of torch cannot load; importing it (as transformers does) fails without the schemas.
    if importlib.util.find_spec("torchvision") is None or torch.version.cuda is not None:
        return
    for name in ("nms", "qnms"):
        try:
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )
        except RuntimeError:  # declared already: this torchvision has its library
            return


_declare_missing_operators()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cuda-rules",
        action="store_true",
        help="run every test as if the CPU were a CUDA device, with its blocks and threads",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect no garbage meanwhile: test files stay, and a fifth of the time went into looking."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before cells are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    met: Counter[tuple[Path, str]] = Counter()
    for item in items:
        one_in = item.get_closest_marker("one_in")
        if one_in is not None and item.get_closest_marker("nightly") is None:
            test = item.path, getattr(item, "originalname", item.name)
            if met[test] % one_in.args[0]:
                item.add_marker(pytest.mark.nightly)
            met[test] += 1


@pytest.fixture(scope="module", autouse=True)
def _no_collection_of_libraries() -> None:
    """Freeze what is there when the tests of a file begin: it is there for ever."""
    from runs.frozen import freeze

    freeze()


@pytest.fixture(autouse=True)
def _rules_of_the_device(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getoption("--cuda-rules"):
        yield
        return
    if "rotor" in request.path.relative_to(request.config.rootpath).parts:
        from fake_cuda.of_rotor import fake_cuda as fake_cuda_of_rotor

        with fake_cuda_of_rotor():
            yield
    else:
        from fake_cuda.allocator import AllocatorRules
        from fake_cuda.device import fake_cuda

        # A library takes its workspace once; a test that plans nothing must not see it come.
        with fake_cuda(AllocatorRules.shrunk(64), workspace_bytes=0):
            yield


@pytest.fixture(scope="module", autouse=True)
def _little_search(request: pytest.FixtureRequest) -> Iterator[None]:
    """For a whole file: what its tests share is planned before the first of them begins."""
    from runs.little_search import little_search

    with little_search(request.path):
        yield
