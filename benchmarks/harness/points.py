"""What an experiment is: points to measure, columns of their rows, what a run was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

Row = dict[str, str]


@dataclass(frozen=True, order=True)
class Point:
    """One measurement to make. Its fields and the device are the key of its row."""

    experiment: str
    network: str
    size: str  # "smoke", "cpu" or "paper": see `networks`
    batch: int
    strategy: str
    budget: str  # a budget, or the setting of a strategy that takes none
    seed: int

    def __str__(self) -> str:
        return f"{self.network} x{self.batch}, {self.strategy} {self.budget}".strip()


POINT_COLUMNS = tuple(field.name for field in fields(Point))
RESULT_COLUMNS = (
    "status", "message", "peak_bytes", "plain_peak_bytes", "budget_bytes", "predicted_peak_bytes",
    "minimum_bytes", "step_ms", "plain_step_ms", "time_ratio", "time_ratio_low",
    "time_ratio_high", "flops", "flops_ratio", "planned_overhead_percent", "bound_percent",
    "gap_percent", "plan_seconds", "solve_seconds", "prepare_seconds", "options_seconds",
    "options", "classes", "nodes", "throughput_ratio", "samples_per_second", "difference",
    "recorded", "solver", "seconds", "cpu_seconds",
)  # fmt: skip
CURVE_COLUMNS = ("curve_ms", "curve_kib")
STAMP_COLUMNS = (
    "commit", "device", "threads", "load", "driver", "torch", "python", "packages", "solvers",
    "warmup", "repeats",
)  # fmt: skip
KEY_COLUMNS = (*POINT_COLUMNS, "device")


@dataclass(frozen=True)
class Options:
    """What a run was asked for."""

    size: str
    device: str
    out: Path
    seed: int
    warmup: int
    repeats: int
    limit_s: float  # of one point
    minutes: float | None  # after which no further point is started
    retry: bool
    only: str


@dataclass(frozen=True)
class Experiment:
    """Points, and the function (`module:name`) that measures one."""

    name: str  # of the file of rows
    function: str
    points: Callable[[Options], list[Point]]
    columns: tuple[str, ...] = (*POINT_COLUMNS, *RESULT_COLUMNS, *STAMP_COLUMNS)
