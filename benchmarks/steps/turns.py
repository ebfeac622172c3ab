"""What a training step costs beside plain PyTorch, what a capture costs, and whether plans hold.

Four kinds of subjects: a step at the whole plain budget over a plain one, a step that recomputes
every block beside `torch.utils.checkpoint`, the seconds of a capture, and the extra time of a step
as measured less as planned. Times are CPU time of one thread. Each checkout runs in a process of
its own, in which plain PyTorch and what is compared take steps in turn; the ratio is taken pair by
pair. With two checkouts, the processes take turns in rounds, and a figure is the median of the
rounds' medians: a busy machine is no advantage to either. A crash and a refusal are rows, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from harness import meter
from harness.experiment import BENCHMARKS, RESULTS, commit, text_of
from harness.points import Row
from steps import table
from steps.cases import Subject, chosen

ROOT = BENCHMARKS.parent
SOURCES = ("rkgb/src", "rotor/src", "rockmate/src")
LAST_WORDS = 300  # characters of what a process wrote before it died
COLUMNS = (
    *("which", "commit", "kind", "name", "network", "size", "strategy", "budget"),
    *("status", "message", "self_test", "target", "plain_step_ms", "step_ms"),
    *("time_ratio", "time_ratio_low", "time_ratio_high", "flops_ratio"),
    *("planned_overhead_percent", "measured_overhead_percent", "measured_minus_planned_points"),
    *("capture_seconds", "capture_seconds_low", "capture_seconds_high", "plan_seconds"),
    *("guards_us", "peak_bytes", "budget_bytes", "least_budget", "rounds", "pairs"),
    *("device", "threads", "load", "torch", "python"),
)
Reply = dict[str, Any]
Draw = Callable[[Path, Path, Sequence[str]], list[Path]]  # rows, pictures, names


class Checkout:
    """A tree of the three packages, and the process that measures it."""

    def __init__(self, which: str, root: Path, limit_s: float) -> None:
        self.which = which
        self.root = root.resolve()
        self.limit_s = limit_s
        self.commit = commit(self.root)
        self.log: IO[bytes] | None = None  # what the process writes beside its replies
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, **request: Any) -> Reply:
        """Return the reply to one request; "failed" or "timeout" where there is none."""
        if self.process is None:
            self.process = self._start()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], self.limit_s)[0]:
            self.close()
            return {"status": "timeout", "message": f"stopped after {self.limit_s:.0f} s"}
        line = self.process.stdout.readline()
        if not line:
            message = f"the process ended: {self._last_words()}"
            self.close()
            return {"status": "failed", "message": message}
        reply: Reply = json.loads(line)
        if reply.get("died"):  # perhaps between two requests, so that replies are one late
            reply["message"] += f": {self._last_words()}"
            self.close()
        return reply

    def open(self, subject: Subject, smoke: bool) -> Reply:
        """Build and plan a subject; a capture is measured at once."""
        return self.ask(subject=asdict(subject), smoke=smoke)

    def _start(self) -> subprocess.Popen[bytes]:
        path = [*(str(self.root / source) for source in SOURCES), str(BENCHMARKS)]
        path.append(os.environ.get("PYTHONPATH", ""))
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (`close` closes it)
        one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        return subprocess.Popen(
            [sys.executable, "-m", "steps.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,  # so that its children can be ended with it
            env={
                **os.environ,
                "ROCKMATE_CACHE": "off",  # older checkouts have no argument for it
                **one,
                "PYTHONPATH": os.pathsep.join(path).strip(os.pathsep),
                "STEP_CHECKOUT": str(self.root),
                "KINETO_LOG_LEVEL": "99",
            },
        )

    def _last_words(self) -> str:
        assert self.log is not None
        self.log.seek(0, os.SEEK_END)  # the position is the process's own, too
        size = self.log.tell()
        self.log.seek(max(0, size - 4 * LAST_WORDS))
        return " ".join(self.log.read().decode(errors="replace").split())[-LAST_WORDS:]

    def close(self) -> None:
        """End the process and its children."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
            self.process = None
        if self.log is not None:
            self.log.close()
            self.log = None


# ------------------------------------------------------------------ measuring


def measure(
    subject: Subject, checkouts: Sequence[Checkout], flags: argparse.Namespace
) -> list[tuple[Checkout, Reply]]:
    """Return for each checkout what it prepared and the rounds it took, in turn with the others."""
    found: list[tuple[Checkout, Reply]] = []
    if subject.kind == "capture":  # anew at every round: a process captures a network once
        found = [(checkout, {"status": "ok", "rounds": []}) for checkout in checkouts]
    else:
        found = [(checkout, checkout.open(subject, flags.smoke)) for checkout in checkouts]
        for _, reply in found:
            reply["rounds"] = []
    for _ in range(flags.rounds):
        for checkout, reply in found:
            if reply["status"] != "ok" or not comparable(reply):
                continue
            if subject.kind == "capture":
                answer = checkout.open(subject, flags.smoke)
            else:
                answer = checkout.ask(do="turn", seconds=0 if flags.smoke else flags.seconds)
            if answer["status"] == "ok":
                reply["rounds"].append(answer["times"])
            else:
                reply |= {"status": answer["status"], "message": answer["message"]}
    for checkout, reply in found:
        if subject.kind != "capture" and reply["status"] == "ok":
            checkout.ask(do="close")
    return found


def comparable(reply: Reply) -> bool:
    """Tell whether plain PyTorch and a contender could be prepared, or nothing has to be."""
    facts = reply.get("contenders")
    alive = [name for name, own in (facts or {}).items() if own["status"] == "ok"]
    return facts is None or ("plain" in alive and len(alive) > 1)


def rows_of(subject: Subject, reply: Reply) -> list[Reply]:
    """Return a row for each contender but plain PyTorch, whatever became of it."""
    base: Reply = {
        "kind": subject.kind,
        "name": subject.name,
        "network": subject.network,
        "budget": subject.budget,
        "target": subject.target,
        "strategy": "rockmate",
        "status": reply["status"],
        "message": reply.get("message", ""),
        "rounds": len(reply["rounds"]),
    }
    rounds: list[dict[str, list[float]]] = reply["rounds"]
    if subject.kind == "capture":
        return [base | capture_figures(rounds)] if reply["status"] == "ok" else [base]
    facts: dict[str, Reply] = reply.get("contenders", {"rockmate": {}})
    rows = []
    for name, own in facts.items():
        if name == "plain":
            continue
        row = base | {"strategy": name, "target": None if name == "checkpoint" else subject.target}
        row |= own if reply["status"] == "ok" else {}
        if subject.kind == "recomputed":
            row["budget"] = "peak of checkpoint"
        if facts.get("plain", {}).get("status", "ok") != "ok":
            row |= {key: facts["plain"][key] for key in ("status", "message")}
        if row["status"] == "ok":
            row |= step_figures(rounds, name)
            if subject.kind == "planned":
                measured = row["measured_overhead_percent"]
                row["measured_minus_planned_points"] = measured - row["planned_overhead_percent"]
        rows.append(row)
    return rows


def capture_figures(rounds: Sequence[Mapping[str, list[float]]]) -> Reply:
    """Return the median of the captures, and the least and the most."""
    captures = [seconds for one in rounds for seconds in one["capture_seconds"]]
    return {
        "capture_seconds": statistics.median(captures),
        "capture_seconds_low": min(captures),
        "capture_seconds_high": max(captures),
        "plan_seconds": statistics.median(s for one in rounds for s in one["plan_seconds"]),
    }


def step_figures(rounds: Sequence[Mapping[str, list[float]]], name: str) -> Reply:
    """Return the ratio over plain PyTorch: of pairs of steps, of rounds, each time the median."""
    pairs = [list(zip(one[name], one["plain"], strict=True)) for one in rounds]
    ratios = [statistics.median(ours / plain for ours, plain in one) for one in pairs]
    ratio = statistics.median(ratios)
    return {
        "time_ratio": ratio,
        "time_ratio_low": min(ratios),
        "time_ratio_high": max(ratios),
        "measured_overhead_percent": 100 * (ratio - 1),
        "step_ms": statistics.median(ours for one in pairs for ours, _ in one),
        "plain_step_ms": statistics.median(plain for one in pairs for _, plain in one),
        "pairs": sum(map(len, pairs)),
    }


# ------------------------------------------------------------------ showing


def show(subject: Subject, checkouts: Sequence[Checkout], smoke: bool) -> str:
    """Return the profile of a planned step in every checkout."""
    parts = []
    for checkout in checkouts:
        reply = checkout.open(subject, smoke)
        if reply["status"] == "ok" and subject.kind != "capture":
            reply = checkout.ask(do="profile")
        text = reply.get("text") or f"{reply['status']}: {reply.get('message', 'no steps in it')}"
        parts.append(f"{subject.name}, {checkout.which} ({checkout.commit})\n\n{text}\n")
        checkout.close()
    return "\n".join(parts)


def flags_of(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--against", type=Path, help="a second checkout, measured in turn with this"
    )
    parser.add_argument("--only", nargs="+", default=[], help="subjects by name or part of it")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--rounds", type=int, help="rounds of each checkout (5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="CPU seconds of one round")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a reply may take")
    parser.add_argument("--profile", metavar="NAME", help="print where a planned step's time goes")
    parser.add_argument("--list", action="store_true", help="print the names of the subjects")
    parser.add_argument("--out", type=Path, help="folder of the rows and the picture")
    flags = parser.parse_args(argv)
    if flags.against is not None and not flags.against.is_dir():
        parser.error(f"--against {flags.against}: there is no such folder")
    flags.rounds = flags.rounds or (1 if flags.smoke else 5)
    flags.out = flags.out or RESULTS / "latest" / ("smoke" if flags.smoke else "")
    flags.subjects = chosen([flags.profile] if flags.profile else flags.only, flags.smoke)
    if not flags.subjects:
        parser.error("no subject has such a name; --list prints them")
    return flags


def main(argv: Sequence[str], draw: Draw | None = None) -> int:
    """Measure, and write a row for each subject, checkout and contender; `draw` draws them."""
    flags = flags_of(argv)
    if flags.list:
        print("\n".join(subject.name for subject in flags.subjects))
        return 0
    checkouts = [Checkout("this", ROOT, flags.limit)]
    if flags.against is not None:
        checkouts.append(Checkout("against", flags.against, flags.limit))
    try:
        if flags.profile:
            for subject in flags.subjects:
                print(show(subject, checkouts, flags.smoke), flush=True)
            return 0
        run(checkouts, flags)
    finally:
        for checkout in checkouts:
            checkout.close()
    finish(flags.out, draw)
    return 0


def run(checkouts: Sequence[Checkout], flags: argparse.Namespace) -> list[Row]:
    """Measure every subject; rows are written after each."""
    import torch

    stamp = {**meter.environment(torch.device("cpu")), "threads": "1"}
    rows: list[Row] = []
    for subject in flags.subjects:
        begin, load = time.monotonic(), os.getloadavg()[0]
        new = [
            {**stamp, **row, "which": checkout.which, "commit": checkout.commit, "load": load}
            | {"size": "smoke" if flags.smoke else "cpu"}
            for checkout, reply in measure(subject, checkouts, flags)
            for row in rows_of(subject, reply)
        ]
        own = [{column: text_of(row.get(column)) for column in COLUMNS} for row in new]
        rows += own
        meter.write_csv(flags.out / "step.csv", rows)
        print(f"{subject.name}  [{time.monotonic() - begin:.0f} s]")
        for row in own:
            words = table.step_figure(row, precise=True)
            print(f"  {row['which']:8}{row['strategy']:24}{words}{table.step_verdict(row)}")
            if row["message"]:
                print(f"  {'':8}{row['message'][:200]}")
        sys.stdout.flush()
    return rows


def finish(out: Path, draw: Draw | None) -> None:
    """Print the table, and draw the picture."""
    text = table.step_table(out)
    (out / "step.md").write_text(text, encoding="utf-8")
    print(f"\n{text}")
    written = [out / "step.csv", out / "step.md"]
    if draw is not None:
        written += draw(out, out / "figures", ("step",))
    print("written: " + ", ".join(map(str, written)))
