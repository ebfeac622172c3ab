"""What float32 kernels compute in: torch's new settings and the older names, as in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from oracles.training import assert_same_gradients
from rkgb.torch_api.private.flags import fp32_precision, set_fp32_precision, unfrozen_flags
from runs.planned import wrap

_backends: Any = torch.backends
PLACES = [
    (backend, kind)
    for kind in ("all", "matmul", "conv", "rnn")
    for backend in ("generic", "cuda", "mkldnn")
    if kind == "all" or backend != "generic"
]
SETTINGS: dict[str, Callable[[], None]] = {
    "everything": lambda: setattr(_backends, "fp32_precision", "tf32"),
    "cudnn": lambda: setattr(_backends.cudnn, "fp32_precision", "tf32"),
    "its convolutions": lambda: setattr(_backends.cudnn.conv, "fp32_precision", "ieee"),
    "its recurrent layers": lambda: setattr(_backends.cudnn.rnn, "fp32_precision", "ieee"),
    "products on CUDA": lambda: setattr(_backends.cuda.matmul, "fp32_precision", "tf32"),
    "oneDNN": lambda: setattr(_backends.mkldnn, "fp32_precision", "bf16"),
    "products in oneDNN": lambda: setattr(_backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "convolutions in oneDNN": lambda: setattr(_backends.mkldnn.conv, "fp32_precision", "bf16"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "older name": lambda: setattr(_backends.cuda.matmul, "allow_tf32", True),
    "older name of cuDNN": lambda: setattr(_backends.cudnn, "allow_tf32", False),
}


def _read() -> list[str]:
    return [fp32_precision(*place) for place in PLACES]


def _reset() -> None:
    for backend in ("generic", "cuda", "mkldnn"):
        set_fp32_precision(backend, "all", "none")
    torch.set_float32_matmul_precision("highest")
    _backends.cudnn.allow_tf32 = True
    for place in PLACES:
        set_fp32_precision(
            *place, "tf32" if place in (("cuda", "conv"), ("cuda", "rnn")) else "none"
        )


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with unfrozen_flags():  # torch's own tests, of which others take a part, forbid to set them
        _reset()
        yield
        _reset()


def _model() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Flatten(), *body, nn.Linear(64, 8))


def _step(module: nn.Module, x: torch.Tensor, between: Callable[[], None] | None = None) -> None:
    module.zero_grad()
    loss = module(x).square().mean()
    if between is not None:
        between()
    loss.backward()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("when", ["before planning", "between steps"])
def test_every_setting_of_precision_trains_as_plain(setting: str, when: str) -> None:
    model = _model()
    twin = copy.deepcopy(model)
    x = torch.randn(64, 3, 4, 4)
    if when == "before planning":
        SETTINGS[setting]()
    wrapped = wrap(model, x, 0.7)
    for step in range(3):
        if when == "between steps" and step == 1:
            SETTINGS[setting]()
        before = _read()
        for module in (wrapped, twin):
            _step(module, x)
        assert _read() == before
        assert_same_gradients(model, twin)


@pytest.mark.parametrize("setting", ["everything", "products in oneDNN", "older name"])
def test_what_runs_again_runs_in_the_precision_of_its_forward(setting: str) -> None:
    model = _model()
    twin = copy.deepcopy(model)
    x = torch.randn(64, 3, 4, 4)
    wrapped = wrap(model, x, 0.7)
    assert wrapped.plan.overhead > 0
    found = []
    for module in (wrapped, twin):
        _reset()
        _step(module, x, SETTINGS[setting])
        found.append(_read())
        # What was set for all still holds for single operations.
        set_fp32_precision("generic", "all", "ieee")
        found.append(_read())
    assert found[:2] == found[2:]
    assert_same_gradients(model, twin)
