"""Global flags of torch by which kernels are chosen, and how they are put back.

A forward that ran under `sdpa_kernel(...)`, `cudnn.flags(...)` or another precision is recomputed
in a backward that may run outside: with other kernels it would give other bits. What a forward sets
for a part of itself is kept with the operations of that part, which run so again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rkgb.torch_api.torch_private import (
    backend_flags,
    fp32_precision,
    sdpa_priority_order,
    set_fp32_precision,
    set_grad_mode,
    set_sdpa_priority_order,
    unfrozen_flags,
)

_cuda = torch.backends.cuda
_mkldnn: Any = torch.backends.mkldnn
_cudnn: Any = torch.backends.cudnn
_running = threading.local()


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    def write(value: Any) -> None:
        with unfrozen_flags():
            setattr(owner, name, value)

    return (lambda: getattr(owner, name)), write


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _precision(backend: str, kind: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    def write(value: Any) -> None:
        set_fp32_precision(backend, kind, value)

    return functools.partial(fp32_precision, backend, kind), write


# What single operations compute in follows from what was set for all: it comes first, so that
# nothing is set for an operation that follows.
_PRECISIONS = {
    f"fp32.{backend}.{kind}": _precision(backend, kind)
    for kind in ("all", "matmul", "conv", "rnn")
    for backend in ("generic", "cuda", "mkldnn")
    if kind == "all" or backend != "generic"
}
# How each flag is read and set.
_FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "sdp.flash": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "sdp.mem_efficient": (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "sdp.math": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    "sdp.cudnn": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    "sdp.order": (sdpa_priority_order, set_sdpa_priority_order),
    "cudnn.enabled": _attribute(_cudnn, "enabled"),
    "cudnn.benchmark": _attribute(_cudnn, "benchmark"),
    "cudnn.deterministic": _attribute(_cudnn, "deterministic"),
    "matmul.fp16_sums": _attribute(_cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    "matmul.bf16_sums": _attribute(_cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    "matmul.fp16_accumulation": _attribute(_cuda.matmul, "allow_fp16_accumulation"),
    "mkldnn.enabled": _attribute(_mkldnn, "enabled"),
    "mkldnn.deterministic": _attribute(_mkldnn, "deterministic"),
    **_PRECISIONS,
    "deterministic": (_deterministic, _set_deterministic),
}
Flags = tuple[tuple[str, Any], ...]  # name and value of some of them


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The flags at one moment."""

    values: tuple[Any, ...]

    @classmethod
    def now(cls) -> KernelChoice:
        return cls(tuple(read() for read, _ in _FLAGS.values()))

    def make_current(self) -> None:
        """Set every flag that is another one now."""
        for (read, write), value in zip(_FLAGS.values(), self.values, strict=True):
            if read() != value:
                write(value)

    def flags_unlike(self, other: KernelChoice) -> Flags:
        """Return the flags that are others here, with their values here."""
        pairs = zip(_FLAGS, self.values, other.values, strict=True)
        return tuple((name, mine) for name, mine, theirs in pairs if mine != theirs)


@contextlib.contextmanager
def with_flags(flags: Flags) -> Iterator[None]:
    """While active, some flags are set as given, and all others as they are."""
    before = [(name, _FLAGS[name][0]()) for name, _ in flags]
    try:
        for name, value in flags:
            _FLAGS[name][1](value)
        yield
    finally:
        for name, value in before:
            _FLAGS[name][1](value)


def calling_with(flags: Flags, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as it runs where these flags are set."""
    if not flags:
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        with with_flags(flags):
            return function(*args, **kwargs)

    return call


class FlagWatch:
    """Says which flags a forward has set for the operation that runs."""

    def __init__(self) -> None:
        self.start, self.seen = KernelChoice.now(), backend_flags()

    def changed(self) -> Flags:
        """Return the flags that are others than at the start.

        Raises:
            UnknownFlagError: one is that cannot be set again.
        """
        if backend_flags() == self.seen:
            return ()
        flags = KernelChoice.now().flags_unlike(self.start)
        if not flags:
            raise UnknownFlagError
        return flags


class UnknownFlagError(Exception):
    """A flag that chooses kernels was changed, of a kind that nothing is known about."""


class RecomputingAs:
    """While active in this thread, forwards that are run again choose kernels as then."""

    def __init__(self, then: KernelChoice, now: KernelChoice) -> None:
        self.pair = (now, then)

    def __enter__(self) -> None:
        _running.pair = self.pair

    def __exit__(self, *_: object) -> None:
        _running.pair = None
        self.pair[0].make_current()  # an error may have come in between


def switch_forward(on: bool) -> None:
    """Begin or end a part of a backward that runs forwards again: grad mode, and the flags."""
    set_grad_mode(on)
    pair = getattr(_running, "pair", None)
    if pair is not None:
        pair[on].make_current()


@contextlib.contextmanager
def running_a_forward() -> Iterator[None]:
    """While active, a backward runs a forward again: some kernels give less without grad mode."""
    switch_forward(True)
    try:
        yield
    finally:
        switch_forward(False)
