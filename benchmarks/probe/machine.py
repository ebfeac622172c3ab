"""What every section needs: networks at two sizes, a step, its memory, its time, its gradients."""

from __future__ import annotations

import contextlib
import copy
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness import meter
from harness.networks import NETWORKS
from models.loss import WithLoss
from models.lstm import LSTMLanguageModel
from rkgb.engine import device_of, trace_memory

Row = dict[str, Any]
Gradients = dict[str, Tensor]
# Networks of the probe: name -> (network of the harness, its size and batch on a GPU).
_NETWORKS = {
    "gpt2": ("gpt2-small", "paper", 8),
    "gpt2-medium": ("gpt2-medium", "paper", 8),
    "resnet50": ("resnet50", "paper", 64),
    "unet": ("unet", "paper", 8),
}


@dataclass(frozen=True)
class Ready:
    """A network on the device, with one batch; its result is a loss."""

    model: nn.Module
    sample: tuple[Any, ...]
    autocast: torch.dtype | None = None

    def region(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast region that forwards run in."""
        device = next(self.model.parameters()).device.type
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device, dtype=self.autocast)

    def step(self, module: nn.Module | None = None) -> None:
        """Run one forward and backward, of the network or of another module in its place."""
        with self.region():
            loss = (module or self.model)(*self.sample)
        loss.backward()

    @contextlib.contextmanager
    def with_gradients(self, module: nn.Module) -> Iterator[None]:
        """While active the parameters have gradients already, which are resident."""
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        try:
            yield
        finally:
            for parameter in module.parameters():
                parameter.grad = None

    def gradients(self, module: nn.Module | None = None) -> Gradients:
        """Return the gradients of a step from the present random state, which stays as it is."""
        owner = module or self.model
        for parameter in owner.parameters():
            parameter.grad = None
        with same_random(next(owner.parameters()).device):
            self.step(owner)
        found = {n: p.grad for n, p in owner.named_parameters() if p.grad is not None}
        for parameter in owner.parameters():
            parameter.grad = None
        return found


@dataclass(frozen=True)
class Machine:
    """The device that is probed, and whether everything is to be tiny."""

    device: torch.device
    tiny: bool

    @property
    def is_cuda(self) -> bool:
        """Whether there is a GPU to learn about."""
        return self.device.type == "cuda"

    def network(self, name: str, kind: str = "fp32", *, channels_last: bool = False) -> Ready:
        """Make a network; `kind` is "fp32", "bf16" (everything) or "amp" (autocast to bf16)."""
        torch.manual_seed(0)
        if name == "lstm":
            model, sample = self._lstm()
        else:
            network, size, batch = _NETWORKS[name]
            case = NETWORKS[network].case("smoke" if self.tiny else size, 2 if self.tiny else batch)
            model, sample = case.model, case.sample
        model.to(self.device)
        sample = tuple(tensor.to(self.device) for tensor in sample)
        if kind == "bf16":
            model.bfloat16()
            sample = tuple(t.bfloat16() if t.is_floating_point() else t for t in sample)
        if channels_last:
            model.to(memory_format=torch.channels_last)
            sample = tuple(
                t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
                for t in sample
            )
        return Ready(model, sample, torch.bfloat16 if kind == "amp" else None)

    def _lstm(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        vocab, width, rows, length = (50, 8, 2, 6) if self.tiny else (10000, 512, 32, 128)

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

        text = torch.randint(vocab, (rows, length + 1))
        model = WithLoss(LSTMLanguageModel(vocab=vocab, d_model=width, nlayers=2), loss)
        return model, (text[:, :-1].contiguous(), text[:, 1:].contiguous())

    def peak(self, call: Callable[[], object]) -> tuple[int, int]:
        """Return (bytes asked for, bytes in blocks) at the peak of a call, above its start."""
        gc.collect()
        trace = trace_memory(lambda _span: call(), self.device)
        return trace.peak_bytes, trace.allocated_peak_bytes

    def held_by(
        self,
        step: Callable[[], object],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        inputs: Sequence[Tensor],
    ) -> int:
        """Return the most that a whole step holds of the device, with all that is there before."""
        if not self.is_cuda:
            return meter.held_bytes(model, optimizer, inputs) + self.peak(step)[0]
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        context = total - free - torch.cuda.memory_reserved(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        step()
        torch.cuda.synchronize(self.device)
        return int(context + torch.cuda.max_memory_reserved(self.device))

    def peak_of_planning(self, call: Callable[[], object]) -> int | None:
        """Return the bytes at the peak of a call that resets the peak itself; None on a CPU."""
        if not self.is_cuda:
            call()
            return None
        reset, highest = torch.cuda.reset_peak_memory_stats, [0]

        def keeping(*args: Any, **kwargs: Any) -> None:
            highest.append(torch.cuda.max_memory_allocated(self.device))
            reset(*args, **kwargs)

        before = torch.cuda.memory_allocated(self.device)
        reset(self.device)
        torch.cuda.reset_peak_memory_stats = keeping
        try:
            call()
        finally:
            torch.cuda.reset_peak_memory_stats = reset
        return max(*highest, torch.cuda.max_memory_allocated(self.device)) - before

    def milliseconds(self, call: Callable[[], object], times: int = 0) -> tuple[float, float]:
        """Return the least (device, host) milliseconds of some calls."""
        found = [device_of(self.device).time(call) for _ in range(times or (2 if self.tiny else 5))]
        return min(t.device_ms for t in found), min(t.host_ms for t in found)

    def counters(self) -> Row:
        """Return what the allocator has handed out and holds, in bytes; nothing on a CPU."""
        if not self.is_cuda:
            return {}
        torch.cuda.synchronize(self.device)
        stats = torch.cuda.memory_stats(self.device)
        kinds = {"asked": "requested", "allocated": "allocated", "reserved": "reserved"}
        return {f"{ours}_bytes": stats[f"{kind}_bytes.all.current"] for ours, kind in kinds.items()}


@contextlib.contextmanager
def same_random(device: torch.device) -> Iterator[None]:
    """Put the random state back afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


def apart(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Row:
    """Return how many gradients differ between two steps, and by how much of their norm."""
    differing, worst = 0, 0.0
    for name, a in first.items():
        b = second[name]
        if not torch.equal(a, b):
            differing += 1
            norm = float(a.double().norm()) or 1e-30
            worst = max(worst, float((a.double() - b.double()).norm()) / norm)
    return {"gradients": len(first), "differing": differing, "worst": worst}


def fresh(model: nn.Module) -> nn.Module:
    """Return a copy of a module, with its own parameters."""
    return copy.deepcopy(model)


def seconds_of(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return a call's result and the seconds that it took."""
    began = time.perf_counter()
    return call(), time.perf_counter() - began
