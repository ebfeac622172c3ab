"""Run an experiment point by point: each in its own process, each one row, resumable.

A row is written as soon as its point ends, whatever the end: "ok", "infeasible" (the budget is
below what can be done), "refused" (the strategy cannot run the network), "over budget" (a strategy
that takes none needs more than there is), "timeout" or "failed", with the message. Points whose row
is there already are skipped, so an interrupted run is continued by starting it again.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.points import KEY_COLUMNS, Experiment, Options, Point, Row

BENCHMARKS = Path(__file__).resolve().parent.parent
RESULTS = BENCHMARKS / "results"


# What measuring imports anyway, here or deep inside torch: once, and not in every point.
PRELOAD = (
    "measures.planning",
    "torch._inductor",
    "torch._dynamo",
    "torch.export",
    "torch.profiler",
    "torch.utils.flop_counter",
    "ortools.sat.python.cp_model",
    "ortools.linear_solver.pywraplp",
    "networkx",
)
WHOLE_GRAPH = ("checkmate", "cbc", "highs", "cp-sat")  # solvers that may run out of time


def tolerated(row: Mapping[str, str]) -> bool:
    """Tell whether a row that is not "ok" says something about a strategy, and not about us."""
    status, strategy = row["status"], row["strategy"].split()[0]
    if status in ("ok", "infeasible", "over budget"):
        return True
    if strategy.startswith("compile") or strategy == "selective":
        # torch.compile may lack a compiler, a package or time; selective checkpointing refuses,
        # with a RuntimeError, networks that change in place what it saved
        return True
    if status == "timeout":
        return strategy in WHOLE_GRAPH
    return status == "refused" and strategy in ("rotor", *WHOLE_GRAPH)


# ------------------------------------------------------------------ rows


class Table:
    """A CSV file to which rows are appended; a line that a crash cut off is dropped."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = tuple(columns)
        self.rows: list[Row] = []
        if path.exists():
            text = path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]
            self.rows = [
                row for row in csv.DictReader(whole.splitlines()) if None not in row.values()
            ]
            header = next(csv.reader(whole.splitlines()), [])
            if whole != text or tuple(header) != self.columns:
                self._rewrite()
        else:
            self._rewrite()

    def _rewrite(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows(self.rows)

    def _writer(self, file: Any) -> csv.DictWriter[str]:
        return csv.DictWriter(
            file, self.columns, restval="", extrasaction="ignore", lineterminator="\n"
        )

    def append(self, row: Row) -> None:
        """Write one row at once."""
        self.rows.append(row)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            self._writer(file).writerow(row)
            file.flush()

    def drop(self, unwanted: Callable[[Row], bool]) -> None:
        """Remove rows."""
        self.rows = [row for row in self.rows if not unwanted(row)]
        self._rewrite()


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def key_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what makes two rows the same measurement."""
    return tuple(str(row[column]) for column in KEY_COLUMNS)


def text_of(value: Any) -> str:
    """Return a figure as it is written: no more digits than mean something, one line."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return " ".join(str(value).split())


def measured_where(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the sentence that says where the rows come from."""

    def values(column: str) -> str:
        return ", ".join(dict.fromkeys(row[column] for row in rows))

    return (
        f"Device {values('device')}, threads {values('threads')}, torch {values('torch')}, "
        f"commit {values('commit')}.\n"
    )


# ------------------------------------------------------------------ running


class Worker:
    """The other end of `worker.py`; started at the first request."""

    def __init__(self, preload: Sequence[str], path: Sequence[Path] = (BENCHMARKS,)) -> None:
        self.preload = preload
        self.path = path
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, function: str, arguments: Mapping[str, Any], limit_s: float) -> Any:
        """Return the reply to one request, "failed" where the worker itself died."""
        if self.process is None or self.process.poll() is not None:
            self.process = self._start()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"function": function, "arguments": dict(arguments), "timeout_s": limit_s}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self.process.communicate()
            code, self.process = self.process.returncode, None
            text = f"the measuring process ended with exit code {code}"
            return {
                "status": "failed",
                "message": text,
                "seconds": 0.0,
                "cpu_seconds": 0.0,
                "result": {},
            }
        return json.loads(line)

    def _start(self) -> subprocess.Popen[str]:
        path = os.pathsep.join([*map(str, self.path), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            [sys.executable, "-m", "harness.worker", *self.preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path.strip(os.pathsep), "KINETO_LOG_LEVEL": "99"},
        )

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.communicate()  # closes its standard input, which ends it
            self.process = None


def run(
    experiment: Experiment, options: Options, ask: Worker, stamp: Mapping[str, str]
) -> list[Row]:
    """Measure the points that have no row yet; return the rows of all points of this run."""
    table = Table(options.out / f"{experiment.name}.csv", experiment.columns)
    if options.retry:
        table.drop(lambda row: row["status"] in ("failed", "timeout", "refused"))
    known = list(experiment.points(options))
    points = [point for point in known if re.search(options.only, str(point))]
    if known and not points:
        raise SystemExit(
            f"no point has {options.only!r} in it; there are:\n" + "\n".join(map(str, known))
        )
    keys = {key_of(asdict(p) | {"device": stamp["device"]}): p for p in points}
    done = {key_of(row) for row in table.rows}
    todo = [(key, point) for key, point in keys.items() if key not in done]
    print(
        f"{experiment.name}: {len(todo)} points to measure, {len(keys) - len(todo)} there already"
    )
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    for number, (_, point) in enumerate(todo, start=1):
        if deadline is not None and time.monotonic() > deadline:
            print(f"  {options.minutes:g} minutes are over: {len(todo) - number + 1} points left")
            break
        row = measured_row(experiment.function, point, options, ask, stamp)
        table.append(row)
        print(f"  {number:3}/{len(todo)}  {line_of(row)}", flush=True)
    return [row for row in table.rows if key_of(row) in keys]


def measured_row(
    function: str, point: Point, options: Options, ask: Worker, stamp: Mapping[str, str]
) -> Row:
    """Measure one point; whatever happens, the answer is a row."""
    arguments = {
        "point": asdict(point),
        "device": options.device,
        "warmup": options.warmup,
        "repeats": options.repeats,
    }
    load = os.getloadavg()[0]
    reply = ask(function, arguments, options.limit_s)
    row = {
        **asdict(point),
        **reply["result"],
        **stamp,
        "status": reply["status"],
        "message": reply["message"],
        "seconds": round(reply["seconds"], 2),
        "cpu_seconds": round(reply["cpu_seconds"], 2),
        "load": round(load, 2),
        "warmup": options.warmup,
        "repeats": options.repeats,
    }
    return {key: text_of(value) for key, value in row.items()}


def line_of(row: Mapping[str, str]) -> str:
    """Return a row in a few words."""
    where = f"{row['network']} x{row['batch']}, {row['strategy']} {row['budget']}"
    words = [f"{where:58}"]
    if row["status"] == "ok":
        if row.get("peak_bytes") and row.get("plain_peak_bytes"):
            share = int(row["peak_bytes"]) / int(row["plain_peak_bytes"])
            words.append(f"peak {100 * share:5.1f} %")
        if row.get("time_ratio"):
            words.append(f"time x{float(row['time_ratio']):.3f}")
        if row.get("flops_ratio"):
            words.append(f"FLOPs x{float(row['flops_ratio']):.4f}")
        if row.get("planned_overhead_percent"):
            words.append(f"planned +{float(row['planned_overhead_percent']):.1f} %")
        if row.get("throughput_ratio"):
            words.append(f"throughput x{float(row['throughput_ratio']):.3f}")
        if row.get("solve_seconds"):
            words.append(f"solved in {float(row['solve_seconds']):.2f} s")
    else:
        words.append(f"{row['status']}: {row['message'][:160]}")
    return "  ".join([*words, f"[{float(row['seconds']):.1f} s]"])


def stamp_of(device: str) -> dict[str, str]:
    """Return what a reader needs to judge a figure: commit, machine, versions."""
    import torch

    name, driver = platform.machine(), ""
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
        driver = f"CUDA {torch.version.cuda}"
    installed = {
        package: importlib.metadata.version(package)
        for package in ("rkgb", "rk-rotor", "rockmate", "ortools")
    }
    return {
        "commit": commit(),
        "device": f"{torch.device(device).type} ({name})",
        "threads": str(torch.get_num_threads()),
        "driver": driver,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "packages": ", ".join(f"{k} {installed[k]}" for k in ("rkgb", "rk-rotor", "rockmate")),
        "solvers": f"ortools {installed['ortools']}",
    }


def commit(root: Path = BENCHMARKS.parent) -> str:
    """Return the commit, marked when code differs from it; results being written do not count."""

    def git(*words: str) -> str:
        found = subprocess.run(
            ["git", *words], capture_output=True, text=True, check=False, cwd=root
        )
        return found.stdout.strip()

    changed = git(
        "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"
    )
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if changed else "")


def summary(rows: Iterable[Mapping[str, str]]) -> tuple[str, list[Mapping[str, str]]]:
    """Return how the points ended, in words, and the rows that ended as none should."""
    rows = list(rows)
    counts = Counter(row["status"] for row in rows)
    unexpected = [row for row in rows if not tolerated(row)]
    text = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    return text or "no points", unexpected


def main(experiments: Sequence[Experiment], description: str, argv: Sequence[str] = ()) -> int:
    """Run experiments as the command line asks; return 1 where a row is an unexpected failure."""
    options = parse(description, argv or sys.argv[1:])
    if options.device.startswith("cuda"):
        refuse_without_cuda(options.device)
    ask = Worker(PRELOAD)
    begin = time.monotonic()
    try:
        stamp = stamp_of(options.device)
        print(", ".join(f"{key} {value}" for key, value in stamp.items() if value))
        if options.size == "paper":
            from harness.forecast import forecast  # loads torch

            for experiment in experiments:
                print(forecast(experiment.name, experiment.points(options), options), flush=True)
        rows = [row for e in experiments for row in run(e, options, ask, stamp)]
    finally:
        ask.close()
    text, unexpected = summary(rows)
    print(f"{text}; {time.monotonic() - begin:.0f} s; rows in {options.out}")
    for row in unexpected:
        print(f"unexpected: {line_of(row)}\n  {row['message']}", file=sys.stderr)
    return 1 if unexpected else 0


def refuse_without_cuda(device: str) -> None:
    """End with an explanation where the device is not there."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(
            f"{device} was asked for, and PyTorch {torch.__version__} finds no CUDA device here. "
            "Run it on a machine with one, or leave --paper and --device out."
        )


def parse(description: str, argv: Sequence[str]) -> Options:
    """Read the flags that all experiments have."""
    parser = argparse.ArgumentParser(description=description.strip().splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--paper", action="store_true", help="the papers' sizes, on CUDA")
    parser.add_argument("--device", help="cpu, or cuda (with --paper the default)")
    parser.add_argument("--out", type=Path, help="folder of the rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=1, help="pairs of steps before any is timed")
    parser.add_argument("--repeats", type=int, help="timed steps of each kind")
    parser.add_argument("--limit", type=float, help="seconds that one point may take")
    parser.add_argument("--minutes", type=float, help="start no point after so many")
    parser.add_argument("--retry", action="store_true", help="measure failed rows again")
    parser.add_argument("--only", default="", help="points whose description matches this")
    flags = parser.parse_args(argv)
    if flags.smoke and flags.paper:
        parser.error("--smoke and --paper exclude each other")
    size = "smoke" if flags.smoke else "paper" if flags.paper else "cpu"
    limits = {"smoke": 180.0, "cpu": 240.0, "paper": 3600.0}
    repeats = {"smoke": 2, "cpu": 5, "paper": 10}
    return Options(
        size=size,
        device=flags.device or ("cuda" if flags.paper else "cpu"),
        out=flags.out or (RESULTS / "latest/smoke" if flags.smoke else RESULTS),
        seed=flags.seed,
        warmup=flags.warmup,
        repeats=flags.repeats or repeats[size],
        limit_s=flags.limit or limits[size],
        minutes=flags.minutes,
        retry=flags.retry,
        only=flags.only,
    )
