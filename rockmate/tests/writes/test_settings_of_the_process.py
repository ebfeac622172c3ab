"""A forward that sets how the process works: every step does it, and planning does not."""

from __future__ import annotations

import gc
import locale
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rockmate import Rockmate

Setting = tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], Any]]


def _mask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _put_path(path: list[str]) -> None:
    sys.path[:] = path


SETTINGS: dict[str, Setting] = {
    "folder": (lambda: os.chdir("/"), os.getcwd, os.chdir),
    "mask": (lambda: os.umask(0o077), _mask, os.umask),
    "recursion": (
        lambda: sys.setrecursionlimit(4321),
        sys.getrecursionlimit,
        sys.setrecursionlimit,
    ),
    "switching": (
        lambda: sys.setswitchinterval(0.0123),
        sys.getswitchinterval,
        sys.setswitchinterval,
    ),
    "digits": (
        lambda: sys.set_int_max_str_digits(5432),
        sys.get_int_max_str_digits,
        sys.set_int_max_str_digits,
    ),
    "path": (lambda: sys.path.append("nowhere"), lambda: [*sys.path], _put_path),
    "garbage": (gc.disable, gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "generations": (
        lambda: gc.set_threshold(321),
        gc.get_threshold,
        lambda counts: gc.set_threshold(*counts),
    ),
    "stacks": (
        lambda: threading.stack_size(1 << 20),
        lambda: threading.stack_size(),
        threading.stack_size,
    ),
    "locale": (
        lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8"),
        lambda: locale.setlocale(locale.LC_ALL),
        lambda name: locale.setlocale(locale.LC_ALL, name),
    ),
    "timeout": (
        lambda: socket.setdefaulttimeout(5.0),
        socket.getdefaulttimeout,
        socket.setdefaulttimeout,
    ),
    "signal": (
        lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
        lambda: signal.getsignal(signal.SIGUSR2),
        lambda handler: signal.signal(signal.SIGUSR2, handler),
    ),
}


class Sets(nn.Module):
    def __init__(self, change: Callable[[], Any]) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change()
        y: Tensor = self.body(x)
        return y


@pytest.mark.parametrize("name", SETTINGS)
def test_every_step_sets_it_and_planning_does_not(name: str) -> None:
    change, read, put = SETTINGS[name]
    before = read()
    try:
        rk = Rockmate(Sets(change), torch.randn(8, 16), 1 << 20, cost="flops", progress=False)
        assert read() == before
        for _ in range(4):
            rk(torch.randn(8, 16)).square().mean().backward()
            assert read() != before
            put(before)
    finally:
        put(before)
