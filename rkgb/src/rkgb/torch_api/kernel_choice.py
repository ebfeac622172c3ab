"""Global flags of torch that choose kernels, and how they are restored.

A forward that ran under `sdpa_kernel(...)`, `cudnn.flags(...)` or another precision may be
recomputed in a backward outside of it. With other kernels it would give other bits. Flags that a
forward sets for a part of itself are stored with the operations of that part and set again for
them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rkgb.torch_api.private.autograd import set_grad_mode
from rkgb.torch_api.private.flags import (
    backend_flags,
    fp32_precision,
    sdpa_priority_order,
    set_fp32_precision,
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


# The precision of single operations defaults to the general one. The general one comes first, so
# that no flag is set for an operation that follows the default.
_PRECISIONS = {
    f"fp32.{backend}.{kind}": _precision(backend, kind)
    for kind in ("all", "matmul", "conv", "rnn")
    for backend in ("generic", "cuda", "mkldnn")
    if kind == "all" or backend != "generic"
}
# Functions that read and set each flag.
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
Flags = tuple[tuple[str, Any], ...]  # names and values of some flags


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The flags at one moment."""

    values: tuple[Any, ...]

    @classmethod
    def now(cls) -> KernelChoice:
        return cls(tuple(read() for read, _ in _FLAGS.values()))

    def make_current(self) -> None:
        """Set every flag that differs now."""
        for (read, write), value in zip(_FLAGS.values(), self.values, strict=True):
            if read() != value:
                write(value)

    def with_order_of(self, other: KernelChoice) -> KernelChoice:
        """Return this choice with another one's order of attention's kernels.

        Torch sets the order itself, at the first attention of a process on CUDA.
        """
        pairs = zip(_FLAGS, self.values, other.values, strict=True)
        return KernelChoice(tuple(o if name == "sdp.order" else own for name, own, o in pairs))

    def flags_unlike(self, other: KernelChoice) -> Flags:
        """Return the flags that differ from `other`, with the values here."""
        pairs = zip(_FLAGS, self.values, other.values, strict=True)
        return tuple((name, mine) for name, mine, theirs in pairs if mine != theirs)


@contextlib.contextmanager
def with_flags(flags: Flags) -> Iterator[None]:
    """While active, these flags are set; all others are unchanged."""
    before = [(name, _FLAGS[name][0]()) for name, _ in flags]
    try:
        for name, value in flags:
            _FLAGS[name][1](value)
        yield
    finally:
        for name, value in before:
            _FLAGS[name][1](value)


def calling_with(flags: Flags, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with these flags set during each call."""
    if not flags:
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        with with_flags(flags):
            return function(*args, **kwargs)

    return call


class FlagWatch:
    """Finds the flags that a forward has set for the running operation."""

    def __init__(self) -> None:
        self.start, self.seen = KernelChoice.now(), backend_flags()

    def changed(self) -> Flags:
        """Return the flags that differ from those at the start.

        Raises:
            UnknownFlagError: one of them cannot be set again.
        """
        if backend_flags() == self.seen:
            return ()
        flags = KernelChoice.now().flags_unlike(self.start)
        if not flags:
            raise UnknownFlagError
        return flags


class UnknownFlagError(Exception):
    """An unknown flag that chooses kernels was changed."""


class RecomputingAs:
    """While active in this thread, recomputed forwards use the kernels of the first forward."""

    def __init__(self, then: KernelChoice, now: KernelChoice) -> None:
        self.pair = (now, then)

    def __enter__(self) -> None:
        _running.pair = self.pair

    def __exit__(self, *_: object) -> None:
        _running.pair = None
        self.pair[0].make_current()  # an error may have left other flags


def switch_forward(on: bool) -> None:
    """Switch grad mode and flags at the begin and end of a recomputed forward in a backward."""
    set_grad_mode(on)
    pair = getattr(_running, "pair", None)
    if pair is not None:
        pair[on].make_current()


@contextlib.contextmanager
def running_a_forward() -> Iterator[None]:
    """Run a recomputed forward in a backward: some kernels need grad mode for all results."""
    switch_forward(True)
    try:
        yield
    finally:
        switch_forward(False)
