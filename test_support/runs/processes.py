"""Run code of a test file in a process of its own, or a function in several that form a gloo group.

They are forks of one process that has imported what they need, and done nothing else: importing it
takes each of them five seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from runs.little_search import little_search

# Names that a package installed alone does not have are left out; what is there by the last of them
# is there for ever.
_IMPORTED = (
    *("pytest", "torch.distributed.fsdp", "torch.distributed.pipelining", "runs.processes"),
    *("ortools.sat.python.cp_model", "ortools.linear_solver.pywraplp", "rotor"),
    *("rockmate", "rockmate.planners", "oracles.training", "zoo.nets", "runs.frozen_here"),
)
_FORKS = multiprocessing.get_context("forkserver")
_LOOK_S = 0.05
_AFTERMATH_S = 10.0  # for the others, once one has failed
# On a busy machine processes may take any time. Those that wait for each other compute next to
# nothing: threads of gloo that look around take a hundredth of a processor.
_IDLE_S, _LEAST_CPU_S = 120.0, 3.0


def run_alone(path: str, code: str, *args: str) -> tuple[str, str]:
    """Run code of a file as `python -c` does; return what it has printed, and its standard error.

    Raises:
        AssertionError: it has failed; the text is its standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = _fork(out, err, _alone, path, code, args)
        process.join()
        printed, told = out.read_text(), err.read_text()
    assert process.exitcode == 0, told
    return printed, told


def _alone(path: str, code: str, args: tuple[str, ...]) -> None:
    sys.argv = ["-c", *args]
    with little_search(path):
        exec(code, {"__name__": "__main__"})


def _fork(out: Path, err: Path, function: Callable[..., None], *args: Any) -> BaseProcess:
    """Start a process that calls a function, and prints into files."""
    _FORKS.set_forkserver_preload(list(_IMPORTED))
    environment = dict(os.environ)
    process = _FORKS.Process(target=_begin, args=(out, err, environment, function, args))
    process.start()
    return process


def _begin(
    out: Path, err: Path, environment: dict[str, str], function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:  # fmt: skip
    for path, stream in ((out, 1), (err, 2)):
        with path.open("a") as file:
            os.dup2(file.fileno(), stream)
    os.environ.update(environment)
    function(*args)


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
        processes = [
            _fork(log, log, _rank, path, work, rank, world, folder, args)
            for rank, log in enumerate(logs)
        ]
        try:
            _wait_for(processes, seconds)
        finally:
            late = [process.exitcode is None for process in processes]
            _end(processes)
        outputs = [log.read_text() for log in logs]
    _raise_failures(processes, late, outputs)
    return outputs


def _wait_for(processes: Sequence[BaseProcess], seconds: float) -> None:
    """Wait until all have ended: not for ever, and not long for others than one that has failed."""
    now = idle_since = time.monotonic()
    end, computed_s = now + seconds, 0.0
    while any(process.exitcode is None for process in processes) and now < end:
        time.sleep(_LOOK_S)
        now = time.monotonic()
        if any(process.exitcode for process in processes):
            end = min(end, now + _AFTERMATH_S)
        taken_s = _cpu_s(processes)  # of those that have not ended
        if abs(taken_s - computed_s) > _LEAST_CPU_S:
            computed_s, idle_since = taken_s, now
        if now > idle_since + _IDLE_S:
            end = now


def _cpu_s(processes: Sequence[BaseProcess]) -> float:
    """Return the time of the processor that processes have had; where nobody knows, that of now."""
    if not sys.platform.startswith("linux"):
        return time.monotonic()
    taken = 0
    for process in processes:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            taken += int(words[11]) + int(words[12])  # in user mode and in the kernel
    return taken / os.sysconf("SC_CLK_TCK")


def _end(processes: Sequence[BaseProcess]) -> None:
    """End those that have not ended, which first say where they are."""
    for process in processes:
        if process.exitcode is None and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGABRT)
    for process in processes:
        process.join(_AFTERMATH_S)
        process.kill()
        process.join()


def _raise_failures(
    processes: Sequence[BaseProcess], late: Sequence[bool], outputs: Sequence[str]
) -> None:
    rows = zip(processes, late, outputs, strict=True)
    told = [
        f"process {rank} {'has not ended' if is_late else f'has ended with {p.exitcode}'}:\n{out}"
        for rank, (p, is_late, out) in enumerate(rows)
        if p.exitcode
    ]
    if told:
        raise AssertionError("\n".join(told))


def _rank(path: str, work: str, rank: int, world: int, folder: str, args: tuple[str, ...]) -> None:
    warnings.simplefilter("ignore")
    join(rank, world, folder)
    with little_search(path):
        runpy.run_path(path)[work](rank, *args)
    leave()


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
