"""What a loss outside of the module takes, seen once between a forward and its backward."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rkgb.elements import flatten
from rkgb.engine import device_of
from rkgb.recording import LiveBytes
from rkgb.torch_api import (
    current_backward,
    current_dispatch_modes,
    dispatch_mode_stack,
    is_in_compiled_code,
)
from rockmate.files.plan_file import SeenLoss
from rockmate.whole_step.optimizers import tensors_bytes
from rockmate.whole_step.outputs import loss_outside_bytes

TRIES = 3  # steps that are watched, where another forward comes before the backward


class LossWatch(ABC):
    """Watches what is made of the outputs of steps, until a backward has shown what it takes."""

    def __init__(self, *, is_awaited: bool) -> None:
        self.is_awaited = is_awaited
        self.is_open = False  # a step is being watched
        self._counter: _Counter | None = None
        self._tries = 0

    @abstractmethod
    def note(self, seen: SeenLoss) -> None:
        """Take in what the loss took; its backward goes on."""

    def close(self) -> None:
        """Stop watching: another call comes, whose memory is none of the loss."""
        if self._counter is None or self._counter.close():
            self._counter, self.is_open = None, False

    def follow(self, result: Any) -> None:
        """Watch what is made of the results of a forward, until its backward begins."""
        outputs = [x for x in flatten(result)[0] if isinstance(x, Tensor) and x.requires_grad]
        left_bytes = loss_outside_bytes(outputs, outputs[0].device) if outputs else 0
        self._tries += 1
        self.is_awaited = bool(left_bytes) and self._tries < TRIES
        if left_bytes and not self.is_open and _can_watch(outputs[0].device):
            self.is_open = True
            self._counter = _watched(outputs, outputs[0].device, left_bytes, self.note)


def _watched(
    outputs: Sequence[Tensor],
    device: torch.device,
    left_bytes: int,
    tell: Callable[[SeenLoss], None],
) -> _Counter:
    """Count from the end of a forward to the beginning of its backward, and tell what was seen.

    The counter closes itself when the loss is let go of.
    """
    counter: _Counter = _OfDevice(device) if device.type == "cuda" else _OfHost(outputs)
    watch = _Watch(counter, device, left_bytes, tell)
    for node in [output.grad_fn for output in outputs if output.grad_fn is not None]:
        node.register_prehook(watch.begin)
    weakref.finalize(watch, counter.close).atexit = False
    return counter


@dataclass(eq=False)
class _Watch:
    """What the autograd nodes of outputs hold, and call when a backward comes."""

    _counter: _Counter
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


def _can_watch(device: torch.device) -> bool:
    """Whether what is held between two moments can be counted here and now.

    A mode that is entered within compiled code is not active after it, and the other way round.
    """
    is_seen_by_modes = not current_dispatch_modes() and not is_in_compiled_code()
    return device.type == "cuda" or is_seen_by_modes


class _OfDevice:
    """Counts what is held beside what was there when it began, by the allocator's counters."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before_bytes = torch.cuda.memory_allocated(device)
        self._is_over = False
        torch.cuda.reset_peak_memory_stats(device)  # the peak begins anew

    def end(self) -> tuple[int, int] | None:
        """Count no more; return the most that was held, and what is; None where it is not known."""
        if self._is_over:
            return None
        self._is_over = True
        most, now = (torch.cuda.max_memory_allocated, torch.cuda.memory_allocated)
        return most(self._device) - self._before_bytes, now(self._device) - self._before_bytes

    def close(self) -> bool:
        """Count no more; return False where something has to stay behind."""
        self._is_over = True
        return True


class _OfHost:
    """The same by a mode that sees operations of this thread, as a CPU has no counters."""

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
        may_leave = current_backward() == -1 and not is_in_compiled_code()
        if may_leave and modes and modes[-1] is self._live:
            self._live.__exit__(None, None, None)
            self._is_open = False
        return not self._is_open


_Counter: TypeAlias = _OfDevice | _OfHost
