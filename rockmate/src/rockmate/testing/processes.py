"""Run a function of a test file in several processes that form a gloo group on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import torch

_CODE = (
    "import runpy, sys; path, work, rank, world, port, *args = sys.argv[1:]; "
    "from rockmate.testing.processes import join, leave; join(int(rank), int(world), int(port)); "
    "runpy.run_path(path)[work](int(rank), *args); leave()"
)


def run_in_processes(
    path: str, work: str, *args: str, world: int = 2, seconds: float = 240
) -> list[str]:
    """Call `work(rank, *args)` of a file in each process; return what each has printed.

    Raises:
        AssertionError: one has failed; the text is what it has printed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-c", _CODE, path, work]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(port), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    _raise_failures(processes, outputs)
    return outputs


def _raise_failures(processes: Sequence[subprocess.Popen[str]], outputs: Sequence[str]) -> None:
    failed = [out for p, out in zip(processes, outputs, strict=True) if p.returncode]
    if failed:
        raise AssertionError("\n".join(failed))


def join(rank: int, world: int, port: int) -> None:
    """Join the group, with one thread."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )


def leave() -> None:
    """End this process, which has asserted all it had to.

    Threads of gloo that are still alive when the interpreter tears down make C++ abort ("terminate
    called without an active exception"), now and then, with or without us.
    """
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
