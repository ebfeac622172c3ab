"""A Checkpointable held against its module, at limits that are found out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rotor.checkpointable import Checkpointable
from rotor.errors import InfeasibleBudgetError
from rotor.runtime.memory import MemoryMeter
from rotor.runtime.rng import RngState


def one_millisecond(call: Callable[[], object]) -> float:
    """A timer that reads no clock: every call takes a millisecond."""
    call()
    return 1.0


def assert_trains_like(
    module: nn.Module, twin: nn.Module, inputs: list[Any], learning_rate: float = 1e-3
) -> None:
    """Train both, one step per input, and assert equal bits of everything at every step.

    Outputs, gradients of the input and of parameters, buffers, parameters and the random stream.
    The generator is never seeded in between: each step begins where the other's began.
    """
    optimizers = [
        torch.optim.SGD(m.parameters(), learning_rate, momentum=0.9) for m in (module, twin)
    ]
    devices = {parameter.device for parameter in twin.parameters()}
    for step, value in enumerate(inputs):
        start = RngState.now(devices)
        results = []
        for m, optimizer in zip((module, twin), optimizers, strict=True):
            start.restore()
            x = copy.deepcopy(value)
            leaves = [t for t in (x if isinstance(x, tuple) else (x,)) if t.is_floating_point()]
            for leaf in leaves:
                leaf.requires_grad_()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            output = m(x)
            outputs = output if isinstance(output, tuple | list) else (output,)
            sum(o.square().mean() for o in outputs if o.requires_grad).backward()
            results.append((outputs, [leaf.grad for leaf in leaves], torch.get_rng_state()))
            grads = {name: p.grad for name, p in m.named_parameters()}
            results[-1] += (grads,)  # type: ignore[assignment]
            optimizer.step()
        _assert_same(results[0], results[1], f"step {step}")
        _assert_same(dict(module.state_dict()), dict(twin.state_dict()), f"state after {step}")


def _assert_same(mine: Any, theirs: Any, where: str) -> None:
    if isinstance(mine, dict):
        assert list(mine) == list(theirs), where
        for key in mine:
            _assert_same(mine[key], theirs[key], f"{where}, {key}")
    elif isinstance(mine, tuple | list):
        assert len(mine) == len(theirs), where
        for index, (left, right) in enumerate(zip(mine, theirs, strict=True)):
            _assert_same(left, right, f"{where}, {index}")
    elif mine is None or theirs is None:
        assert mine is theirs, f"{where}: a gradient is missing"
    else:
        assert torch.isfinite(mine).all(), f"{where}: not finite, so equality proves nothing"
        assert torch.equal(mine, theirs), f"{where}: values differ"


def least_limit(chk: Checkpointable) -> int:
    """Return the smallest limit that a measured module accepts."""
    try:
        chk.compute_sequence(1)
    except InfeasibleBudgetError as error:
        return error.minimum_bytes
    raise AssertionError("a limit of one byte was accepted")


def plain_peak(chk: Checkpointable) -> int:
    """Return the peak of a measured module that recomputes nothing."""
    chk.compute_sequence(10**12)
    return chk.get_expected_memory()


def at_fraction(chk: Checkpointable, fraction: float) -> int:
    """Plan between the least memory (0) and that of a run without recomputation (1)."""
    least, most = least_limit(chk), plain_peak(chk)
    limit = int(least + fraction * (most - least))
    chk.compute_sequence(limit)
    return limit


def peak_of(call: Callable[[], object], device: torch.device) -> int:
    """Return the peak of `call` on the device, in bytes above the start."""
    with MemoryMeter(device) as meter:
        meter.run("call", call)
    return meter.usage("call").peak_bytes
