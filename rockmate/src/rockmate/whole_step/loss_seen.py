"""What a loss outside of the module takes, seen once between a forward and its backward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rkgb.engine import device_of
from rkgb.recording import LiveBytes
from rkgb.torch_api import current_backward, current_dispatch_modes, dispatch_mode_stack
from rockmate.whole_step.optimizers import tensors_bytes


@dataclass(frozen=True)
class SeenLoss:
    """What a loss outside took in a step to which `left_bytes` had been left for it."""

    left_bytes: int
    most_bytes: int  # at once, before the module's backward
    given_bytes: int  # of that the gradients that the backward begins with: the module counts them
    kept_bytes: int  # when it begins, beside them

    @property
    def taken_bytes(self) -> int:
        """What to leave to it all the time."""
        return max(0, self.most_bytes - self.given_bytes)

    def at(self, left_bytes: int) -> SeenLoss:
        """Return what it takes of another call, in proportion to what would be left to it."""
        each = (self.most_bytes, self.given_bytes, self.kept_bytes)
        return SeenLoss(left_bytes, *(-(-n * left_bytes // self.left_bytes) for n in each))


def watch_loss(
    outputs: Sequence[Tensor],
    device: torch.device,
    left_bytes: int,
    tell: Callable[[SeenLoss], None],
) -> Counter:
    """Count from the end of a forward to the beginning of its backward, and tell what was seen.

    Close the counter before the next forward; it closes itself when the loss is let go of.
    """
    counter: Counter = _OfDevice(device) if device.type == "cuda" else _OfHost(outputs)
    watch = _Watch(counter, device, left_bytes, tell)
    for node in [output.grad_fn for output in outputs if output.grad_fn is not None]:
        node.register_prehook(watch.begin)
    weakref.finalize(watch, counter.close).atexit = False
    return counter


@dataclass(eq=False)
class _Watch:
    """What the autograd nodes of outputs hold, and call when a backward comes."""

    _counter: Counter
    _device: torch.device
    _left_bytes: int
    _tell: Callable[[SeenLoss], None]

    def begin(self, grads: Sequence[Tensor | None]) -> None:
        """Note that the backward has come to an output."""
        counted = self._counter.end()
        if counted is not None:
            most_bytes, now_bytes = counted
            given = tensors_bytes([grad for grad in grads if grad is not None], self._device)
            kept_bytes = max(0, now_bytes - given)
            self._tell(SeenLoss(self._left_bytes, max(0, most_bytes), given, kept_bytes))


def can_watch(device: torch.device) -> bool:
    """Whether what is held between two moments can be counted here and now."""
    return device.type == "cuda" or not current_dispatch_modes()


class Counter(Protocol):
    """Counts what is held beside what was there when it began."""

    def end(self) -> tuple[int, int] | None:
        """Count no more; return the most that was held, and what is; None where it is not known."""

    def close(self) -> bool:
        """Count no more, and leave nothing behind; return False where that cannot be yet."""


class _OfDevice:
    """By the allocator's counters, whose peak begins anew."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before_bytes = torch.cuda.memory_allocated(device)
        self._is_over = False
        torch.cuda.reset_peak_memory_stats(device)

    def end(self) -> tuple[int, int] | None:
        if self._is_over:
            return None
        self._is_over = True
        most, now = (torch.cuda.max_memory_allocated, torch.cuda.memory_allocated)
        return most(self._device) - self._before_bytes, now(self._device) - self._before_bytes

    def close(self) -> bool:
        self._is_over = True
        return True


class _OfHost:
    """By a mode that sees operations of this thread, as a CPU has no counters."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        device = torch.device("cpu")
        self._thread = threading.get_ident()
        self._live = LiveBytes((), device, device_of(device).block_bytes)
        self._live.see(outputs)  # they may go before the backward
        self._before_bytes = self._live.now_bytes
        self._live.__enter__()  # type: ignore[no-untyped-call]
        self._is_open = True

    def end(self) -> tuple[int, int] | None:
        is_seen = not self._live.is_over and threading.get_ident() == self._thread
        self._live.is_over = True
        found = (self._live.peak_bytes, self._live.now_bytes)
        return (found[0] - self._before_bytes, found[1] - self._before_bytes) if is_seen else None

    def close(self) -> bool:
        """Take the mode off, unless it is another thread's, or below the user's own."""
        self._live.is_over = True
        modes: list[Any] = dispatch_mode_stack()
        # The engine puts back the modes of the thread that called it: none is taken off in there.
        if current_backward() == -1 and modes and modes[-1] is self._live:
            self._live.__exit__(None, None, None)
            self._is_open = False
        return not self._is_open
