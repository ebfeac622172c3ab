"""Optimal rematerialization of sequential PyTorch networks within a memory budget."""

from rotor.chain import Chain, Option, Stage
from rotor.errors import (
    InfeasibleBudgetError,
    InvalidChainError,
    InvalidScheduleError,
    RotorError,
    TableTooLargeError,
)
from rotor.ops import Backward, ForwardCheckpoint, ForwardEnableGrad, ForwardNoGrad, Op
from rotor.schedule import Schedule
from rotor.simulate import MemoryTimeline, TimelineRow, simulate
from rotor.solver import ScheduleTable, solve, solve_table

__version__ = "0.1.0"

__all__ = [
    "Backward",
    "Chain",
    "ForwardCheckpoint",
    "ForwardEnableGrad",
    "ForwardNoGrad",
    "InfeasibleBudgetError",
    "InvalidChainError",
    "InvalidScheduleError",
    "MemoryTimeline",
    "Op",
    "Option",
    "RotorError",
    "Schedule",
    "ScheduleTable",
    "Stage",
    "TableTooLargeError",
    "TimelineRow",
    "simulate",
    "solve",
    "solve_table",
]
