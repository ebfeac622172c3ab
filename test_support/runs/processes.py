"""Run a function of a test file in several processes that form a gloo group on this machine."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

_CODE = (
    "import runpy, sys; path, work, rank, world, folder, *args = sys.argv[1:]; "
    "from runs.processes import join, leave; from runs.little_search import little_search; "
    "join(int(rank), int(world), folder); search = little_search(path); search.__enter__(); "
    "runpy.run_path(path)[work](int(rank), *args); leave()"
)
_LOOK_S = 0.05
_AFTERMATH_S = 10.0  # for the others, once one has failed
# On a busy machine processes may take any time. Those that wait for each other compute next to
# nothing: threads of gloo that look around take a hundredth of a processor.
_IDLE_S, _LEAST_CPU_S = 120.0, 3.0


def run_in_processes(
    path: str, work: str, *args: str, world: int = 2, seconds: float = 1800
) -> list[str]:
    """Call `work(rank, *args)` of a file in each process; return what each has printed.

    Raises:
        AssertionError: one has failed, or all wait for each other, or have not ended in `seconds`;
            the text is what they have printed, and where they were.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Into files: a pipe that nobody reads at the moment would stop who writes much.
        logs = [Path(folder, f"{rank}.log") for rank in range(world)]
        command = [sys.executable, "-W", "ignore", "-c", _CODE, path, work]
        processes = []
        for rank, log in enumerate(logs):
            given = [str(rank), str(world), folder, *args]
            with log.open("w") as file:
                processes.append(
                    subprocess.Popen([*command, *given], stdout=file, stderr=subprocess.STDOUT)
                )
        try:
            _wait_for(processes, seconds)
        finally:
            late = [process.poll() is None for process in processes]
            _end(processes)
        outputs = [log.read_text() for log in logs]
    _raise_failures(processes, late, outputs)
    return outputs


def _wait_for(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until all have ended: not for ever, and not long for others than one that has failed."""
    now = idle_since = time.monotonic()
    end, computed_s = now + seconds, 0.0
    while any(process.poll() is None for process in processes) and now < end:
        time.sleep(_LOOK_S)
        now = time.monotonic()
        if any(process.poll() for process in processes):
            end = min(end, now + _AFTERMATH_S)
        taken_s = _cpu_s(processes)  # of those that have not ended
        if abs(taken_s - computed_s) > _LEAST_CPU_S:
            computed_s, idle_since = taken_s, now
        if now > idle_since + _IDLE_S:
            end = now


def _cpu_s(processes: Sequence[subprocess.Popen[bytes]]) -> float:
    """Return the time of the processor that processes have had; where nobody knows, that of now."""
    if not sys.platform.startswith("linux"):
        return time.monotonic()
    taken = 0
    for process in processes:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            taken += int(words[11]) + int(words[12])  # in user mode and in the kernel
    return taken / os.sysconf("SC_CLK_TCK")


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those that have not ended, which first say where they are."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGABRT)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_AFTERMATH_S)
        process.kill()
        process.wait()


def _raise_failures(
    processes: Sequence[subprocess.Popen[bytes]], late: Sequence[bool], outputs: Sequence[str]
) -> None:
    rows = zip(processes, late, outputs, strict=True)
    told = [
        f"process {rank} {'has not ended' if is_late else f'has ended with {p.returncode}'}:\n{out}"
        for rank, (p, is_late, out) in enumerate(rows)
        if p.returncode
    ]
    if told:
        raise AssertionError("\n".join(told))


def join(rank: int, world: int, folder: str) -> None:
    """Join the group, with one thread; whoever is ended from outside says where it is.

    The first process lets the system choose the port of the store, and tells it in a file. A port
    that was only tried before may be somebody else's by then, who never answers the others.
    """
    faulthandler.enable()
    torch.set_num_threads(1)
    told, make = Path(folder, "port"), vars(torch.distributed)["TCPStore"]
    if rank == 0:
        store = make("127.0.0.1", 0, world, True, wait_for_workers=False)
        told.with_suffix(".new").write_text(str(store.port))
        told.with_suffix(".new").replace(told)
    else:
        while not told.exists():
            time.sleep(_LOOK_S)
        port = int(told.read_text())
        store = make("127.0.0.1", port, world, False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)


def leave() -> None:
    """End this process, which has asserted all it had to.

    Threads of gloo that are still alive when the interpreter tears down make C++ abort ("terminate
    called without an active exception"), now and then, with or without us.
    """
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
