"""What every measurement here needs: memory and time of a step, random state, where it was run.

Memory comes from the allocator itself, never from the packages that are measured: on the CPU from
the allocation events that the profiler records, on CUDA from the allocator's counters. Both count
above what is allocated when the step starts, so parameters, their gradients (allocated before) and
inputs are left out, exactly as a budget leaves them out.
"""

from __future__ import annotations

import csv
import gc
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path

# The profiler logs a line at every start and stop; errors are raised and need no log.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

MIB = 2**20
RESULTS = Path(__file__).resolve().parent.parent / "results"


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """Bytes held over one step, above what was held when it started."""

    times_ms: tuple[float, ...]
    held_bytes: tuple[int, ...]  # after each allocation or release
    peak_bytes: int


def trace_memory(step: Callable[[], object], device: torch.device) -> MemoryTrace:
    """Run `step` once and return what the allocator held while it ran."""
    activities = [ProfilerActivity.CPU]
    gc.collect()  # garbage of earlier steps must not be released during this one
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with profile(activities=activities, profile_memory=True) as profiler:
        step()
    kind = (
        torch.autograd.DeviceType.CUDA if device.type == "cuda" else torch.autograd.DeviceType.CPU
    )
    events = [
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == kind
    ]
    events.sort(key=lambda event: event[0])  # stable: equal times stay in order of record
    start = events[0][0] if events else 0
    held = tuple(accumulate(nbytes for _, nbytes in events))
    peak = max(held, default=0)
    if device.type == "cuda":  # the counter is what a budget bounds; the events draw the curve
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    return MemoryTrace(tuple((at - start) / 1e6 for at, _ in events), held, peak)


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Iterable[Tensor]) -> int:
    """Return what is there between two steps on the device of the model, each storage once."""
    state = (v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor))
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    found = list(chain(model.parameters(), model.buffers(), state, gradients, inputs))
    here = (t.untyped_storage() for t in found if t.device == found[0].device)
    return sum({storage._cdata: storage.nbytes() for storage in here}.values())


def timed_ms(step: Callable[[], object], device: torch.device) -> float:
    """Run `step` once and return its time: on a CPU with one thread, what this thread took.

    Where other programs share a core, their time is not the step's.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return _timed_ms(step, device, time.thread_time if alone else time.perf_counter)


def wall_ms(step: Callable[[], object], device: torch.device) -> float:
    """Run `step` once and return how long it took: also where it waits for other threads."""
    return _timed_ms(step, device, time.perf_counter)


def _timed_ms(
    step: Callable[[], object], device: torch.device, clock: Callable[[], float]
) -> float:
    synchronize(device)
    start = clock()
    step()
    synchronize(device)
    return (clock() - start) * 1e3


def resident_bytes(step: Callable[[], object]) -> int | None:
    """Run `step` once and return by how much the process grew at most; None except on Linux.

    What malloc keeps for later hides it: start with MALLOC_MMAP_THRESHOLD_=65536.
    """
    if not Path("/proc/self/clear_refs").exists():
        return None
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the highest mark is set back
    before = _status_bytes("VmRSS")
    step()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def synchronize(device: torch.device) -> None:
    """Wait for the device, where it runs on its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class RandomState:
    """The state of the global generators, on the CPU and on every CUDA device."""

    cpu: Tensor
    cuda: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> RandomState:
        """Return the state at this moment."""
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else ()
        return cls(torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Make the global generators continue from this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))

    def equals(self, other: RandomState) -> bool:
        """Tell whether both states are the same, bit for bit."""
        mine, others = (self.cpu, *self.cuda), (other.cpu, *other.cuda)
        return len(mine) == len(others) and all(map(torch.equal, mine, others))


def first_difference(one: nn.Module, other: nn.Module) -> str | None:
    """Return the name of the first parameter, gradient or buffer that differs in any bit."""
    theirs = dict(other.named_parameters(remove_duplicate=False))
    for name, parameter in one.named_parameters(remove_duplicate=False):
        if not same_bits(parameter, theirs[name]):
            return name
        if not same_bits(parameter.grad, theirs[name].grad):
            return f"{name}.grad"
    buffers = dict(other.named_buffers(remove_duplicate=False))
    for name, buffer in one.named_buffers(remove_duplicate=False):
        if not same_bits(buffer, buffers[name]):
            return name
    return None


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Tell whether two tensors hold the same values, or are both missing."""
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def environment(device: torch.device) -> dict[str, str]:
    """Return what a reader needs to judge a figure: versions, machine, commit."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "commit": commit.stdout.strip() or "unknown",
        "device": f"{device.type} ({name})",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write_csv(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Write rows as CSV; a column that a row lacks stays empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        columns = dict.fromkeys(column for row in rows for column in row)
        writer = csv.DictWriter(file, fieldnames=list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with the first column left-aligned and the others right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def in_mib(size_bytes: int) -> str:
    """Return a size for people, in MiB with one decimal."""
    return f"{size_bytes / MIB:.1f} MiB"
