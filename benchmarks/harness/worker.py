"""A process that measures points, each in a child of its own.

It imports what every measurement needs once, computes nothing itself, and forks for each request.
So a point starts in milliseconds instead of the seconds that importing torch takes, has the memory
peaks of a fresh process, and takes nobody down when it crashes, hangs or is killed for memory.

Requests and replies are lines of JSON on standard input and output:

    {"function": "measures.training:step", "arguments": {...}, "timeout_s": 60.0}
    {"status": "ok", "message": "", "seconds": 3.1, "cpu_seconds": 5.9, "result": {...}}

`status` is "ok", "timeout" or "failed", or the `status` that an exception carries (see `Outcome`).
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

POLL_S = 0.02
LAST_WORDS = 400  # characters of what a child wrote before it died


class Outcome(Exception):  # noqa: N818 (no error: an answer other than figures)
    """What a measurement raises to end with another status than "ok", and what it found so far."""

    def __init__(self, status: str, message: str, **found: Any) -> None:
        super().__init__(message)
        self.status = status
        self.found = found


def serve(preload: list[str]) -> None:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a child is stopped, too
    for name in preload:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run one request in a child, and kill the child and its children at the time limit."""
    with tempfile.TemporaryDirectory() as folder:
        reply, log = Path(folder, "reply.json"), Path(folder, "log.txt")
        begin = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside idle BLAS threads
            pid = os.fork()
        if pid == 0:
            _child(request, reply, log)
        code, cpu_seconds = _wait(pid, begin + float(request["timeout_s"]))
        took = {"seconds": time.monotonic() - begin, "cpu_seconds": cpu_seconds}
        if code is None:
            text = f"stopped after {request['timeout_s']:.0f} s"
            return {"status": "timeout", "message": text, **took, "result": {}}
        if reply.exists():
            return {**json.loads(reply.read_text(encoding="utf-8")), **took}
        died = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        words = log.read_text(encoding="utf-8", errors="replace").strip()[-LAST_WORDS:]
        message = f"{died}: {words}" if words else died
        return {"status": "failed", "message": message, **took, "result": {}}


def _wait(pid: int, deadline: float) -> tuple[int | None, float]:
    """Return the exit code of a child, negative for a signal, and the seconds of CPU it took.

    The code is None if the child had to be stopped.
    """
    try:
        while time.monotonic() < deadline:
            done, status, usage = os.wait4(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
            time.sleep(POLL_S)
        _stop_group(pid)
        _, _, usage = os.wait4(pid, 0)
        return None, usage.ru_utime + usage.ru_stime
    finally:
        _stop_group(pid)  # solvers and compilers that it left behind; itself, if interrupted


def _stop_group(pid: int) -> None:
    for stop in (os.killpg, os.kill):  # the group may not exist yet, or no longer
        try:
            stop(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _child(request: dict[str, Any], reply: Path, log: Path) -> None:
    """Measure, write the reply, and end without the parent's clean-up."""
    try:
        os.setsid()
        with log.open("w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        written = _measured(request)
        draft = reply.with_suffix(".draft")
        draft.write_text(json.dumps(written), encoding="utf-8")
        draft.rename(reply)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _measured(request: dict[str, Any]) -> dict[str, Any]:
    try:
        module, name = request["function"].split(":")
        function = getattr(importlib.import_module(module), name)
        return {"status": "ok", "message": "", "result": function(**request["arguments"])}
    except Outcome as outcome:
        return {"status": outcome.status, "message": str(outcome), "result": outcome.found}
    except Exception as error:
        traceback.print_exc()
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        return {"status": "failed", "message": text, "result": {}}


if __name__ == "__main__":
    from harness import worker  # not as __main__: measurements raise `worker.Outcome`

    worker.serve(sys.argv[1:])
