"""The memory of a device for whole steps, and what of it is left to a call's activations."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rkgb.engine import device_of
from rockmate.files.plan_file import SeenLoss
from rockmate.guards.sharded import device_of_parameters, world_size
from rockmate.whole_step.memory import GRADIENTS, LOSS, SEEN, Coming, Memory, Part
from rockmate.whole_step.optimizers import (
    OptimizerBytes,
    optimizer_bytes,
    tensors_bytes,
    without_tensors,
)
from rockmate.whole_step.outputs import CallBytes


@dataclass(frozen=True, eq=False)
class WholeStep:
    """What a user gives with `memory=`.

    Copies and files of a planned module know the optimizer by what it takes alone.
    """

    asked_bytes: int | None  # None for what the device has
    optimizer: Any = None  # None while it is not known yet
    reserve_bytes: int = 0  # to a loss outside, where the user says so
    is_beside_context: bool = False  # what the device had, which its context was not part of
    seen: SeenLoss | None = None

    @property
    def awaits_loss(self) -> bool:
        """Whether a loss outside gets what it may take, until a step shows what it does."""
        return not self.reserve_bytes and self.seen is None

    def __reduce__(self) -> tuple[Any, ...]:
        optimizer = self.optimizer
        if optimizer is not None and not isinstance(optimizer, str):
            optimizer = replace(without_tensors(optimizer), is_there=False)
        return type(self), (
            *(self.asked_bytes, optimizer, self.reserve_bytes, self.is_beside_context, self.seen),
        )

    def call_bytes(
        self,
        model: nn.Module,
        sample: Any,
        kwargs: Mapping[str, Any] | None,
        device: torch.device | None = None,
    ) -> CallBytes:
        """Return what a call brings and hands out, and what a loss outside may take."""
        where = device or device_of_parameters(model)
        return CallBytes.of(model, sample, kwargs, where, to_come=device is not None)

    def settled(self, memory: Memory) -> WholeStep:
        """Return what holds for later calls: as many bytes as for the first."""
        if self.asked_bytes is not None:
            return self
        return replace(self, asked_bytes=memory.asked_bytes, is_beside_context=True)

    def memory(
        self,
        model: nn.Module,
        call: CallBytes,
        peak_bytes: int | None = None,
        device: torch.device | None = None,
    ) -> Memory:
        """Return where each byte goes while `model` trains on such calls, there or on `device`.

        Raises:
            UnsupportedModuleError: what the optimizer will keep cannot be known.
        """
        to_come, device = device is not None, device or device_of_parameters(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = optimizer_bytes(self.optimizer, trained, device)
        parameters = tensors_bytes(model.parameters(), device, to_come=to_come)
        buffers = tensors_bytes(model.buffers(), device, to_come=to_come)
        gradients = _gradients_bytes(trained, device, optimizer, to_come)
        there = [p.grad for p in trained if p.grad is not None]
        held = 0 if to_come else parameters + buffers + call.inputs_bytes
        held += tensors_bytes(there, device)
        held += optimizer.state_bytes if optimizer.is_there else 0
        held += 0 if isinstance(self.optimizer, OptimizerBytes) else optimizer.copies_bytes
        others = other_tensors_bytes(device, held)
        asked, context = self.asked_bytes, 0
        if asked is None:
            asked = there_is_bytes(device, held)
        elif not self.is_beside_context:
            context = context_bytes(device)
        fragments, buckets = fragments_bytes(device, asked), _buckets_bytes(trained, gradients)
        when = "" if optimizer.is_there or not optimizer.state_bytes else ", to come"
        parts = (
            Part("parameters", parameters),
            Part("buffers", buffers),
            Part(GRADIENTS, gradients),
            Part(f"state of {optimizer.name}{when}", optimizer.state_bytes),
            Part("copies of weights", optimizer.copies_bytes),
            Part("inputs", call.inputs_bytes),
            self._loss(call),
            Part("buckets of DistributedDataParallel", buckets),
            Part("other tensors, workspaces", others),
            Part("context of CUDA", context),
            Part("between blocks of the allocator", fragments),
        )
        stepping = [Part("outputs that are still held", call.outputs_bytes)]
        if not optimizer.in_backward:
            own = f"what {optimizer.name} takes to step"
            stepping.insert(0, Part(own, optimizer.temporary_bytes))
        always = ("parameters", SEEN)
        kept = tuple(part for part in parts if part.size_bytes or part.name in always)
        seen = any(map(_has_hooks, trained)) and not optimizer.in_backward
        come = gradients and not (buckets or seen)
        coming = Coming(not optimizer.in_backward, gradients) if come else None
        then = tuple(stepping)
        return Memory(asked, kept, then, peak_bytes, fragments, coming, call.loss_bytes)

    def _loss(self, call: CallBytes) -> Part:
        """Return what is left to a loss outside: as the user says, or as seen, or what it may."""
        if self.reserve_bytes or self.seen is None:
            return Part(LOSS, self.reserve_bytes or call.loss_bytes)
        return Part(SEEN, self.seen.at(call.loss_bytes).taken_bytes)


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Whether something sees its gradient come, and may keep another."""
    hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return any(hooks)


def _gradients_bytes(
    trained: list[nn.Parameter], device: torch.device, optimizer: OptimizerBytes, to_come: bool
) -> int:
    """Return what gradients take; where each is used when it comes, the largest and its step."""
    found = (p if p.grad is None else p.grad for p in trained)
    each = [tensors_bytes([tensor], device, to_come=to_come) for tensor in found]
    if optimizer.in_backward:
        return max(each, default=0) + optimizer.temporary_bytes
    there = [p.grad for p in trained if p.grad is not None]
    missing = (size for size, p in zip(each, trained, strict=True) if p.grad is None)
    return tensors_bytes(there, device, to_come=to_come) + sum(missing)  # some share storages


def _buckets_bytes(trained: list[nn.Parameter], gradients_bytes: int) -> int:
    """Return what DDP will copy gradients to; it is usually put around the module later."""
    is_sharded = any(hasattr(parameter, "device_mesh") for parameter in trained)
    return gradients_bytes if world_size() > 1 and not is_sharded else 0


_MOST_OF_CONTEXT_BYTES = 1 << 30  # what is held beyond that, other processes hold
_FRAGMENTS = 50  # one part of so many lies between blocks of CUDA's allocator


def there_is_bytes(device: torch.device, held_bytes: int) -> int:
    """Return what the tensors of this process may take, if `held_bytes` of them are there."""
    free_bytes = device_of(device).free_bytes()
    if device.type == "cuda":
        return (free_bytes or 0) + torch.cuda.memory_allocated(device)
    return held_bytes + (min(_free_on_host()) if free_bytes is None else free_bytes)


def context_bytes(device: torch.device) -> int:
    """Return what CUDA's context takes of a device, beside the allocator."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    context = total - free - torch.cuda.memory_reserved(device)
    return int(min(context, _MOST_OF_CONTEXT_BYTES))


def other_tensors_bytes(device: torch.device, known_bytes: int) -> int:
    """Return what is allocated beside what is known: workspaces, other models, averages."""
    if device.type != "cuda":
        return 0
    device_of(device).warm_up()
    return max(0, torch.cuda.memory_allocated(device) - known_bytes)


def fragments_bytes(device: torch.device, whole_bytes: int) -> int:
    """Return what may be reserved without being in a tensor."""
    return -(-whole_bytes // _FRAGMENTS) if device.type == "cuda" else 0


def _free_on_host() -> Iterator[int]:
    """Yield what the machine has left, and the group of processes that this one is in."""
    yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        yield 1024 * int(next(line.split()[1] for line in lines if "MemAvailable" in line))
    with suppress(OSError, ValueError):  # "max" is no number
        group = Path("/sys/fs/cgroup")
        most = int((group / "memory.max").read_text("ascii"))
        yield max(0, most - int((group / "memory.current").read_text("ascii")))
