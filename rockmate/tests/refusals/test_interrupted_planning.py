"""Ctrl-C at any moment of planning leaves the module, and torch, as they were."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import io
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rockmate
from oracles.training import assert_trains_like, eager_copy
from rockmate import Rockmate
from rockmate.planning import no_recomputation, plan, simulate
from rockmate.solvers import bound
from rockmate.solvers.bound import heard_interrupts, lower_bound
from zoo.problems import gpt_problem

POINTS = 24
AROUND = {"__enter__", "__exit__", "begin", "end", "restore", "undo"}


class Net(nn.Module):
    """Dropout moves the random stream, BatchNorm its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            *[nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Tanh()) for _ in range(4)],
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def planned(model: nn.Module, sample: Tensor) -> nn.Module:
    return rockmate.apply(model, sample, 0.95, cost="flops", progress=False)


def state(model: nn.Module) -> dict[str, Any]:
    """All that planning might have touched: of the module, of torch, of Python."""
    values = {name: t.clone() for name, t in model.state_dict().items()}
    places: tuple[Any, ...] = (os, io, builtins, logging.Logger, subprocess.Popen, socket.socket)
    places += (
        torch,
        Tensor,
        nn.functional,
        nn.Module,
        torch.autograd.graph,
        torch.utils.checkpoint,
    )
    return {
        **{f"{p.__name__}.{n}": f for p in places for n, f in vars(p).items() if callable(f)},
        "class": type(model),
        "attributes": sorted(vars(model)),
        "hooks": [len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules()],
        "training": [m.training for m in model.modules()],
        "grads": [p.grad is None for p in model.parameters()],
        "wants": [p.requires_grad for p in model.parameters()],
        "grad mode": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "collects": gc.isenabled(),
        "screen": sys.stdout,
        "sees calls": sys.gettrace(),
        "warnings": [*warnings.filters],
        "signals": signal.getsignal(signal.SIGINT),
        "random": random.getstate(),
        "torch random": torch.get_rng_state().tolist(),
        "values": {name: t.tolist() for name, t in values.items()},
    }


def calls_of(
    work: Callable[[], object],
    stop_at: int | None = None,
    around: dict[tuple[CodeType, int], int] | None = None,
) -> int:
    """Run `work`, and return how many Python functions it calls; a Ctrl-C comes at one of them.

    `around` gets, for each place that begins or ends something for a while, one call there.

    Python drops what a weak reference's callback raises, a Ctrl-C as well, and goes on: then the
    next call is the one.
    """
    count, waits = 0, stop_at is not None

    def watch(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count, waits
        if event == "call":
            count += 1
            by = frame.f_back
            names = {frame.f_code.co_name, by.f_code.co_name if by else ""}
            if around is not None and by is not None and names & AROUND:
                around.setdefault((by.f_code, by.f_lineno), count)
            if waits and stop_at is not None and count >= stop_at:
                waits = False  # one comes, also if this function is set again
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    hook = sys.unraisablehook

    def dropped(what: Any) -> None:
        nonlocal waits
        if what.exc_type is KeyboardInterrupt:
            waits = True
            sys.setprofile(watch)
        else:
            hook(what)

    sys.unraisablehook = dropped
    sys.setprofile(watch)
    try:
        work()
        if stop_at is not None:
            time.sleep(0.1)  # it may come a moment late
    finally:
        sys.setprofile(None)
        sys.unraisablehook = hook
    return count


@pytest.fixture
def _hears_ctrl_c() -> Iterator[None]:
    """A shell lets what runs behind it ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("_hears_ctrl_c")
def test_interrupted_anywhere_the_module_is_as_it_was() -> None:
    torch.manual_seed(0)
    model, sample = Net(), torch.randn(16, 8)
    twin = eager_copy(model)
    planned(eager_copy(model), sample)  # what is imported and registered once
    copy = eager_copy(model)
    around: dict[tuple[CodeType, int], int] = {}
    total = calls_of(lambda: planned(copy, sample), around=around) * 49 // 50  # callbacks vary
    places = [1 + place * (total - 2) // (POINTS - 1) for place in range(POINTS)]
    places += sorted(n for n in around.values() if n < total)[:: max(1, len(around) // POINTS)]
    before, stopped = state(model), 0
    for stop_at in places:
        with contextlib.suppress(KeyboardInterrupt):
            calls_of(lambda: planned(model, sample), stop_at)
        if isinstance(model, Rockmate):  # it came too late: planning took fewer calls this time
            rockmate.remove(model)
        else:
            stopped += 1
        after = state(model)
        for name, value in before.items():
            assert after[name] == value, f"{name}, stopped at call {stop_at} of {total}"
    assert stopped > 0.8 * len(places)
    assert_trains_like(planned(model, sample), twin, sample)


def test_interrupted_at_the_first_step_it_is_planned_at_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, sample = Net(), torch.randn(16, 8)
    twin = eager_copy(model)
    rockmate.apply(model, budget="1MiB", cost="flops")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rockmate.calls.requester.planned_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(sample)
    assert isinstance(model, Rockmate)
    assert_trains_like(model, twin, sample)


def test_the_solver_leaves_ctrl_c_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CP-SAT's own handler a Ctrl-C would end one search of many, and planning go on."""
    from ortools.sat.python import cp_model

    catches: list[bool] = []
    solve = cp_model.CpSolver.solve

    def watched(solver: Any, *args: Any) -> Any:
        catches.append(solver.parameters.catch_sigint_signal)
        return solve(solver, *args)

    monkeypatch.setattr(cp_model.CpSolver, "solve", watched)
    problem = gpt_problem(2)
    everything = simulate(problem, no_recomputation(problem)).peak_bytes
    plan(problem, int(0.7 * everything), effort="fast")
    assert catches
    assert not any(catches)


def test_a_solver_that_takes_ctrl_c_for_itself_does_not_keep_it() -> None:
    """CLP does so while it solves; here the signal is ignored, and then Python's again."""
    before = signal.getsignal(signal.SIGINT)
    get, put = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    get.restype, put.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ours = get(signal.SIGINT)
    try:
        with heard_interrupts():
            put(signal.SIGINT, signal.SIG_IGN)
            for _ in range(2000):
                if get(signal.SIGINT) == ours:
                    break
                time.sleep(0.005)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert get(signal.SIGINT) == ours
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_bound_is_solved_under_python_s_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[bool] = []

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        entered.append(True)
        yield

    monkeypatch.setattr(bound, "heard_interrupts", watched)
    problem = gpt_problem(1)
    everything = simulate(problem, no_recomputation(problem)).peak_bytes
    assert lower_bound(problem, int(0.9 * everything)) is not None
    assert entered
